"""accept_drafts on CUDA: a thread per sequence."""

import tilelang.language as T
from torch import Tensor

from tilelang_ops.common.kernels import cuda_kernel

THREADS = 64


@cuda_kernel(builds=lambda model: [{"width": drafts + 1} for drafts in range(1, model.dspark_block_size + 1)])
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
            # Offsets in registers: as names of loads they stand in every bound check, one in another, which
            # TileLang takes a minute to simplify.
            first = T.alloc_local((1,), "int32")
            length = T.alloc_local((1,), "int32")
            row = T.alloc_local((1,), "int32")
            count = T.alloc_local((1,), "int32")
            is_intact = T.alloc_local((1,), "int32")
            token = T.alloc_local((1,), "int32")
            if seq < num_seqs:
                first[0] = row_offsets[seq]
                length[0] = row_offsets[seq + 1] - first[0]
                count[0] = 0
                is_intact[0] = 1
                for place in T.serial(width):
                    token[0] = 0
                    row[0] = first[0] + place
                    if is_intact[0] == 1 and place < length[0]:
                        token[0] = token_ids[row[0]]
                        draft = draft_ids[row[0]]
                        stands = token[0] == draft and draft >= 0 and faults[row[0]] == T.uint8(0)
                        is_intact[0] = T.if_then_else(stands, 1, 0)
                        count[0] = count[0] + is_intact[0]
                    emitted[seq, place] = token[0]
                num_emitted[seq] = count[0] + 1
                final_rows[seq] = first[0] + count[0]

    return accept_drafts


def run(
    token_ids: Tensor,
    draft_ids: Tensor,
    faults: Tensor,
    row_offsets: Tensor,
    emitted: Tensor,
    num_emitted: Tensor,
    final_rows: Tensor,
) -> None:
    inputs = (t.contiguous() for t in (token_ids, draft_ids, faults, row_offsets))
    kernel(width=emitted.shape[1])(*inputs, emitted, num_emitted, final_rows)
