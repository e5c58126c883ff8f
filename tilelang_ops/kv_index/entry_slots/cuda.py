"""entry_slots on CUDA: a thread looks up to 4 neighbouring entries up."""

import tilelang.language as T
import torch
from torch import Tensor

from tilelang_ops.common.formulas import entry_block, entry_slot
from tilelang_ops.common.kernels import cuda_kernel

THREADS = 128
BLOCK_SIZE = 128  # tokens of a paged block, as served


def _builds(model):
    return [
        {"k": k, "entries_per_block": BLOCK_SIZE // ratio, "source": "int32"}
        for ratio in model.ratios
        for k in (1, model.index_topk)
    ]


@cuda_kernel(builds=_builds)
def kernel(k: int, entries_per_block: int, source: str):
    n, num_seqs, max_blocks = T.dynamic("n"), T.dynamic("num_seqs"), T.dynamic("max_blocks")
    lanes = 4 if k % 4 == 0 else 1
    pieces = k // lanes

    @T.prim_func
    def entry_slots(
        entries: T.Tensor((n, k), source),
        row_seq: T.Tensor((n,), "int32"),
        block_tables: T.Tensor((num_seqs, max_blocks), "int32"),
        out: T.Tensor((n, k), "int32"),
    ):
        with T.Kernel(T.ceildiv(n * pieces, THREADS), threads=THREADS) as block:
            flat = block * THREADS + T.get_thread_binding()
            row, piece = flat // pieces, flat % pieces
            slot = T.alloc_local((lanes,), "int32")
            if row < n:
                seq = T.alloc_var("int32", init=row_seq[row])
                for j in T.vectorized(lanes):
                    slot[j] = T.cast(entries[row, piece * lanes + j], "int32")
                for j in T.unroll(lanes):
                    if slot[j] >= 0:
                        logical = T.alloc_var("int32", init=entry_block(slot[j], entries_per_block))
                        slot[j] = entry_slot(block_tables[seq, logical], slot[j], entries_per_block)
                    else:
                        slot[j] = -1
                for j in T.vectorized(lanes):
                    out[row, piece * lanes + j] = slot[j]

    return entry_slots


def run(entries: Tensor, row_seq: Tensor, block_tables: Tensor, entries_per_block: int) -> Tensor:
    out = torch.empty(entries.shape, dtype=torch.int32, device=entries.device)
    source = str(entries.dtype).removeprefix("torch.")
    program = kernel(k=entries.shape[1], entries_per_block=entries_per_block, source=source)
    program(entries.contiguous(), row_seq.int(), block_tables, out)
    return out
