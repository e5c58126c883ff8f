import torch
from torch import Tensor

from tilelang_ops.common.formulas import entry_block, entry_slot, num_visible, ring_slot
from tilelang_ops.kv_index.window_index import reference as window_index


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
    device, num_rows, num_seqs = positions.device, positions.shape[0], state_slots.shape[0]
    history = window - 1
    row, seqs = torch.arange(num_rows, device=device), torch.arange(num_seqs, device=device)
    seq, position = row_seq.long(), positions.long()
    starts, counts = cu_rows[:-1].long(), cu_rows.diff()
    lowest = torch.zeros_like(starts) if window_starts is None else window_starts.long()
    slots = state_slots[seq].long()
    preceding = row - starts[seq]
    following = cu_rows[seq + 1] - 1 - row

    is_kept = (following < ring) & (position >= lowest[seq])
    ring_index = torch.where(is_kept, ring_slot(slots, position, ring), -1)
    line_index = (seq + 1) * history + row
    # The record of position 0 of each sequence, were the line long enough; without a row nobody asks.
    first = torch.where(counts > 0, position[starts.clamp(max=num_rows - 1)], 0)
    line_starts = (seqs + 1) * history + starts - first
    records = window_index.run(position, line_starts[seq], window, 0)
    place = position[:, None] + torch.arange(1 - window, 1, device=device)
    records = torch.where(place < lowest[seq][:, None], -1, records)

    sources = window_index.run(first - 1, state_slots.long() * ring, history, ring).long()
    targets = (seqs * history + starts)[:, None] + torch.arange(history, device=device)

    visible, ends, entries = [], [], []
    for ratio in ratios:
        is_end = (position + 1) % ratio == 0
        entry = position // ratio
        block = block_tables[seq, entry_block(entry, block_size // ratio)].long()
        visible.append(num_visible(positions, ratio))
        ends.append(torch.where(is_end, row, -1))
        entries.append(torch.where(is_end, entry_slot(block, entry, block_size // ratio), -1))
    per_ratio = (torch.cat(x).view(len(ratios), num_rows) for x in (visible, ends, entries))
    return (
        slots,
        preceding,
        following,
        ring_index,
        line_index,
        records,
        sources.flatten(),
        targets.flatten(),
        *per_ratio,
    )
