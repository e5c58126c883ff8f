"""prefill_metadata on CUDA: one warp for each row, and one for each sequence's history."""

import tilelang.language as T
import torch
from torch import Tensor

from tilelang_ops.common.formulas import entry_block, entry_slot, num_visible
from tilelang_ops.common.kernels import cuda_kernel

THREADS = 128
WARPS = THREADS // 32
BLOCK_SIZE = 128  # tokens of a paged block, as served


@cuda_kernel(
    builds=lambda model: [
        {
            "window": model.sliding_window,
            "block_size": BLOCK_SIZE,
            "ratios": model.ratios,
            "is_bounded": is_bounded,
        }
        for is_bounded in (False, True)
    ]
)
def kernel(window: int, block_size: int, ratios: tuple[int, ...], is_bounded: bool):
    num_seqs, num_bounds, max_blocks = T.dynamic("num_seqs"), T.dynamic("num_bounds"), T.dynamic("max_blocks")
    num_rows, num_starts = T.dynamic("num_rows"), T.dynamic("num_starts")
    num_ratios, history = len(ratios), window - 1
    lanes = 4 if window % 4 == 0 else 1  # records of a thread
    pieces = window // lanes

    @T.prim_func
    def prefill_metadata(
        positions: T.Tensor((num_rows,), "int32"),
        row_seq: T.Tensor((num_rows,), "int32"),
        cu_rows: T.Tensor((num_bounds,), "int32"),
        state_slots: T.Tensor((num_seqs,), "int32"),
        block_tables: T.Tensor((num_seqs, max_blocks), "int32"),
        window_starts: T.Tensor((num_starts,), "int32"),
        places: T.Tensor((5, num_rows), "int64"),
        window_index: T.Tensor((num_rows, window), "int32"),
        history_index: T.Tensor((2, num_seqs, history), "int64"),
        visible: T.Tensor((num_ratios, num_rows), "int32"),
        group_ends: T.Tensor((num_ratios, num_rows), "int64"),
        group_slots: T.Tensor((num_ratios, num_rows), "int64"),
        ring: T.int32,
    ):
        with T.Kernel(T.ceildiv(num_rows + num_seqs, WARPS), threads=THREADS) as block:
            thread = T.get_thread_binding() % 32
            row = T.alloc_var("int32", init=block * WARPS + T.get_thread_binding() // 32)
            seq = T.alloc_var("int32", init=T.min(row - num_rows, num_seqs - 1))
            if row < num_rows:
                seq = row_seq[row]
            slot = T.alloc_var("int32", init=state_slots[seq])
            start = T.alloc_var("int32", init=cu_rows[seq])
            end = T.alloc_var("int32", init=cu_rows[seq + 1])
            first = T.alloc_var("int32", init=0)  # position of the sequence's first row
            if start < end:
                first = positions[start]
            if row >= num_rows:
                for i in T.serial(T.ceildiv(history, 32)):
                    place = i * 32 + thread
                    if place < history and row < num_rows + num_seqs:
                        seen = T.alloc_var("int32", init=first - history + place)
                        source = T.alloc_var("int32", init=-1)
                        if seen >= 0:
                            seen = T.cast(T.cast(seen, "uint32") % T.cast(ring, "uint32"), "int32")
                            source = slot * ring + seen
                        history_index[0, seq, place] = T.cast(source, "int64")
                        history_index[1, seq, place] = T.cast(seq * history + start + place, "int64")
            else:
                position = T.alloc_var("int32", init=positions[row])
                lowest = T.alloc_var("int32", init=0)
                if is_bounded:
                    lowest = T.max(window_starts[seq], 0)
                line_start = T.alloc_var("int32", init=(seq + 1) * history + start - first)
                for i in T.serial(T.ceildiv(pieces, 32)):
                    piece = T.alloc_var("int32", init=i * 32 + thread)
                    if piece < pieces:
                        for j in T.vectorized(lanes):
                            seen_here = position - history + piece * lanes + j
                            window_index[row, piece * lanes + j] = T.if_then_else(
                                seen_here >= lowest, line_start + seen_here, -1
                            )
                if thread == 0:
                    following = T.alloc_var("int32", init=end - 1 - row)
                    in_ring = T.cast(T.cast(position, "uint32") % T.cast(ring, "uint32"), "int32")
                    record = T.alloc_var("int32", init=-1)
                    if following < ring and position >= lowest:
                        record = slot * ring + in_ring
                    places[0, row] = T.cast(slot, "int64")
                    places[1, row] = T.cast(row - start, "int64")
                    places[2, row] = T.cast(following, "int64")
                    places[3, row] = T.cast(record, "int64")
                    places[4, row] = T.cast((seq + 1) * history + row, "int64")
                    for i, ratio in enumerate(ratios):
                        visible[i, row] = num_visible(position, ratio)
                        group_end = T.alloc_var("int64", init=T.int64(-1))
                        group_slot = T.alloc_var("int64", init=T.int64(-1))
                        if (position + 1) % ratio == 0:
                            entry = T.alloc_var("int32", init=position // ratio)
                            part = block_tables[seq, entry_block(entry, block_size // ratio)]
                            group_end = T.cast(row, "int64")
                            group_slot = entry_slot(T.cast(part, "int64"), entry, block_size // ratio)
                        group_ends[i, row] = group_end
                        group_slots[i, row] = group_slot

    return prefill_metadata


def run(
    positions: Tensor,
    row_seq: Tensor,
    cu_rows: Tensor,
    state_slots: Tensor,
    block_tables: Tensor,
    window_starts: Tensor | None,
    window: int,
    ring: int,
    block_size: int,
    ratios: tuple[int, ...],
) -> tuple[Tensor, ...]:
    def empty(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device=positions.device)

    num_rows, num_seqs, num_ratios = positions.shape[0], state_slots.shape[0], len(ratios)
    places = empty(5, num_rows, dtype=torch.int64)
    windows = empty(num_rows, window, dtype=torch.int32)
    history = empty(2, num_seqs, window - 1, dtype=torch.int64)
    visible = empty(num_ratios, num_rows, dtype=torch.int32)
    ends, entries = empty(2, num_ratios, num_rows, dtype=torch.int64)
    program = kernel(
        window=window, block_size=block_size, ratios=ratios, is_bounded=window_starts is not None
    )
    program(
        positions,
        row_seq,
        cu_rows,
        state_slots,
        block_tables,
        state_slots if window_starts is None else window_starts,
        places,
        windows,
        history,
        visible,
        ends,
        entries,
        ring,
    )
    return *places, windows, *history.flatten(1), visible, ends, entries
