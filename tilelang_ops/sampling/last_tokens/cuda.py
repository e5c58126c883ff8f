"""last_tokens on CUDA: a thread per sequence."""

import tilelang.language as T
from torch import Tensor

from tilelang_ops.common.kernels import cuda_kernel

THREADS = 64


@cuda_kernel(builds=lambda model: [{}])
def kernel():
    num_rows, num_seqs = T.dynamic("num_rows"), T.dynamic("num_seqs")
    num_offsets, width = T.dynamic("num_offsets"), T.dynamic("width")

    @T.prim_func
    def last_tokens(
        token_ids: T.Tensor((num_rows,), "int32"),
        total_lens: T.Tensor((num_seqs,), "int32"),
        seqlens_k: T.Tensor((num_seqs,), "int32"),
        row_offsets: T.Tensor((num_offsets,), "int32"),
        emitted: T.Tensor((num_seqs, width), "int32"),
        num_emitted: T.Tensor((num_seqs,), "int32"),
        final_rows: T.Tensor((num_seqs,), "int32"),
    ):
        with T.Kernel(T.ceildiv(num_seqs, THREADS), threads=THREADS) as block:
            seq = block * THREADS + T.get_thread_binding()
            bounds = T.alloc_local((2,), "int32")
            row = T.alloc_local((1,), "int32")
            token = T.alloc_local((1,), "int32")
            count = T.alloc_local((1,), "int32")
            if seq < num_seqs:
                bounds[0] = row_offsets[seq]
                bounds[1] = row_offsets[seq + 1]
                row[0] = T.max(bounds[1] - 1, 0)
                token[0] = 0
                count[0] = 0
                if total_lens[seq] == seqlens_k[seq] and bounds[1] > bounds[0]:
                    count[0] = 1
                    token[0] = token_ids[row[0]]
                for place in T.serial(width):
                    emitted[seq, place] = T.if_then_else(place == 0, token[0], 0)
                num_emitted[seq] = count[0]
                final_rows[seq] = row[0]

    return last_tokens


def run(
    token_ids: Tensor, total_lens: Tensor, seqlens_k: Tensor, row_offsets: Tensor, width: int
) -> tuple[Tensor, Tensor, Tensor]:
    num_seqs = total_lens.shape[0]
    emitted = total_lens.new_empty(num_seqs, width)
    num_emitted, final_rows = total_lens.new_empty(2, num_seqs)
    if num_seqs > 0:
        rows = token_ids if token_ids.shape[0] > 0 else row_offsets  # which nobody reads
        kernel()(rows, total_lens, seqlens_k, row_offsets, emitted, num_emitted, final_rows)
    return emitted, num_emitted, final_rows
