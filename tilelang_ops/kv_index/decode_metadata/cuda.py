"""decode_metadata on CUDA: one block for each row, which counts the sequences that end before it."""

import tilelang.language as T
import torch
from torch import Tensor

from tilelang_ops.common.formulas import entry_block, entry_slot, num_visible, ring_slot
from tilelang_ops.common.kernels import cuda_kernel

THREADS = 128
BLOCK_SIZE = 128  # tokens of a paged block, as served


@cuda_kernel(
    builds=lambda model: [
        {"window": model.sliding_window, "block_size": BLOCK_SIZE, "ratios": model.ratios},
    ]
)
def kernel(window: int, block_size: int, ratios: tuple[int, ...]):
    num_seqs, num_bounds, max_blocks = T.dynamic("num_seqs"), T.dynamic("num_bounds"), T.dynamic("max_blocks")
    num_rows = T.dynamic("num_rows")
    num_ratios = len(ratios)

    @T.prim_func
    def decode_metadata(
        cu_seqlens_q: T.Tensor((num_bounds,), "int32"),
        seqlens_k: T.Tensor((num_seqs,), "int32"),
        state_slots: T.Tensor((num_seqs,), "int32"),
        block_tables: T.Tensor((num_seqs, max_blocks), "int32"),
        row_seq: T.Tensor((num_rows,), "int32"),
        positions: T.Tensor((num_rows,), "int32"),
        row_places: T.Tensor((4, num_rows), "int64"),
        window_index: T.Tensor((num_rows, window), "int32"),
        visible: T.Tensor((num_ratios, num_rows), "int32"),
        group_ends: T.Tensor((num_ratios, num_rows), "int64"),
        group_slots: T.Tensor((num_ratios, num_rows), "int64"),
        ring: T.int32,
    ):
        with T.Kernel(num_rows, threads=THREADS) as row:
            ended = T.alloc_fragment((THREADS,), "int32")
            total = T.alloc_fragment((1,), "int32")
            for i in T.Parallel(THREADS):
                ended[i] = 0
            for part in T.serial(T.ceildiv(num_seqs, THREADS)):
                for i in T.Parallel(THREADS):
                    seq_before = part * THREADS + i
                    if seq_before < num_seqs and cu_seqlens_q[seq_before + 1] <= row:
                        ended[i] = ended[i] + 1
            T.reduce_sum(ended, total, dim=0)
            is_row = total[0] < num_seqs
            seq = T.alloc_var("int32", init=T.if_then_else(is_row, total[0], 0))
            first = T.alloc_var("int32", init=cu_seqlens_q[seq])
            following = T.alloc_var("int32", init=cu_seqlens_q[seq + 1] - 1 - row)
            position = T.alloc_var("int32", init=seqlens_k[seq] - 1 - following)
            slot = T.alloc_var("int32", init=state_slots[seq])
            thread = T.get_thread_binding()
            for i in T.serial(T.ceildiv(window, THREADS)):
                place = i * THREADS + thread
                if place < window:
                    seen = T.alloc_var("int32", init=position - (window - 1) + place)
                    record = T.alloc_var("int32", init=-1)
                    if is_row and seen >= 0:
                        seen = T.cast(T.cast(seen, "uint32") % T.cast(ring, "uint32"), "int32")
                        record = slot * ring + seen
                    window_index[row, place] = record
            if thread == 0:
                row_seq[row] = seq
                if is_row:
                    positions[row] = position
                    row_places[0, row] = T.cast(slot, "int64")
                    row_places[1, row] = T.cast(row - first, "int64")
                    row_places[2, row] = T.cast(following, "int64")
                    place_in_rings = T.cast(ring_slot(slot, position, ring), "int64")
                    row_places[3, row] = T.if_then_else(following < ring, place_in_rings, T.int64(-1))
                else:
                    positions[row] = 0
                    for i in T.unroll(3):
                        row_places[i, row] = T.int64(0)
                    row_places[3, row] = T.int64(-1)
                for i, ratio in enumerate(ratios):
                    visible[i, row] = T.if_then_else(is_row, num_visible(position, ratio), 0)
                    end = T.alloc_var("int64", init=T.int64(-1))
                    record = T.alloc_var("int64", init=T.int64(-1))
                    if is_row and (position + 1) % ratio == 0:
                        entry = T.alloc_var("int32", init=position // ratio)
                        block = block_tables[seq, entry_block(entry, block_size // ratio)]
                        end = T.cast(row, "int64")
                        record = entry_slot(T.cast(block, "int64"), entry, block_size // ratio)
                    group_ends[i, row] = end
                    group_slots[i, row] = record

    return decode_metadata


def run(
    cu_seqlens_q: Tensor,
    seqlens_k: Tensor,
    state_slots: Tensor,
    block_tables: Tensor,
    num_rows: int,
    window: int,
    ring: int,
    block_size: int,
    ratios: tuple[int, ...],
) -> tuple[Tensor, ...]:
    def empty(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device=seqlens_k.device)

    row_seq, positions = empty(2, num_rows, dtype=torch.int32)
    places = empty(4, num_rows, dtype=torch.int64)
    windows = empty(num_rows, window, dtype=torch.int32)
    visible = empty(len(ratios), num_rows, dtype=torch.int32)
    ends, entries = empty(2, len(ratios), num_rows, dtype=torch.int64)
    program = kernel(window=window, block_size=block_size, ratios=ratios)
    program(
        cu_seqlens_q,
        seqlens_k,
        state_slots,
        block_tables,
        row_seq,
        positions,
        places,
        windows,
        visible,
        ends,
        entries,
        ring,
    )
    return row_seq, positions, *places, windows, visible, ends, entries
