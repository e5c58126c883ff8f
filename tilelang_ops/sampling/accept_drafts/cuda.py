"""accept_drafts on CUDA: a thread per sequence."""

import tilelang.language as T
import torch
from torch import Tensor

from tilelang_ops.common.kernels import cuda_kernel

THREADS = 64


@cuda_kernel(builds=lambda model: [{"width": model.dspark_block_size + 1}])
def kernel(width: int):
    num_rows, num_seqs, num_offsets = T.dynamic("num_rows"), T.dynamic("num_seqs"), T.dynamic("num_offsets")

    @T.prim_func
    def accept_drafts(
        token_ids: T.Tensor((num_rows,), "int32"),
        draft_ids: T.Tensor((num_rows,), "int32"),
        faults: T.Tensor((num_rows,), "uint8"),
        row_offsets: T.Tensor((num_offsets,), "int32"),
        emitted: T.Tensor((num_seqs, width), "int32"),
        num_emitted: T.Tensor((num_seqs,), "int32"),
        final_rows: T.Tensor((num_seqs,), "int32"),
    ):
        with T.Kernel(T.ceildiv(num_seqs, THREADS), threads=THREADS) as block:
            seq = block * THREADS + T.get_thread_binding(0)
            count = T.alloc_local((1,), "int32")
            is_intact = T.alloc_local((1,), "int32")
            token = T.alloc_local((1,), "int32")
            if seq < num_seqs:
                first = row_offsets[seq]
                end = row_offsets[seq + 1]
                count[0] = 0
                is_intact[0] = 1
                for place in T.serial(width):
                    token[0] = 0
                    if is_intact[0] == 1 and first + place < end:
                        token[0] = token_ids[first + place]
                        draft = draft_ids[first + place]
                        if token[0] == draft and draft >= 0 and faults[first + place] == T.uint8(0):
                            count[0] = count[0] + 1
                        else:
                            is_intact[0] = 0
                    emitted[seq, place] = token[0]
                num_emitted[seq] = count[0] + 1
                final_rows[seq] = first + count[0]

    return accept_drafts


def run(
    token_ids: Tensor, draft_ids: Tensor, faults: Tensor, row_offsets: Tensor, width: int
) -> tuple[Tensor, Tensor, Tensor]:
    num_seqs = row_offsets.shape[0] - 1
    emitted = torch.empty(num_seqs, width, dtype=torch.int32, device=token_ids.device)
    num_emitted = torch.empty(num_seqs, dtype=torch.int32, device=token_ids.device)
    final_rows = torch.empty_like(num_emitted)
    if num_seqs > 0:
        inputs = (t.contiguous() for t in (token_ids, draft_ids, faults, row_offsets))
        kernel(width=width)(*inputs, emitted, num_emitted, final_rows)
    return emitted, num_emitted, final_rows
