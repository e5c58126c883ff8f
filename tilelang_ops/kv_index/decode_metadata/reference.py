import torch
from torch import Tensor

from tilelang_ops.common.formulas import entry_block, entry_slot, num_visible, ring_slot
from tilelang_ops.kv_index.window_index import reference as window_index


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
    row = torch.arange(num_rows, device=seqlens_k.device)
    is_row = row < cu_seqlens_q[-1]
    seq = torch.searchsorted(cu_seqlens_q[1:].long(), row, right=True)
    seq = torch.where(is_row, seq, 0)
    slots = torch.where(is_row, state_slots[seq].long(), 0)
    preceding = torch.where(is_row, row - cu_seqlens_q[seq], 0)
    following = torch.where(is_row, cu_seqlens_q[seq + 1] - 1 - row, 0)
    positions = torch.where(is_row, seqlens_k[seq] - 1 - following, 0)
    is_kept = is_row & (following < ring)
    ring_index = torch.where(is_kept, ring_slot(slots, positions, ring), -1)
    window_records = window_index.run(torch.where(is_row, positions, -1), slots * ring, window, ring)
    visible, ends, entries = [], [], []
    for ratio in ratios:
        is_end = is_row & ((positions + 1) % ratio == 0)
        entry = positions // ratio
        block = block_tables[seq, entry_block(entry, block_size // ratio)].long()
        visible.append(torch.where(is_row, num_visible(positions, ratio), 0))
        ends.append(torch.where(is_end, row, -1))
        entries.append(torch.where(is_end, entry_slot(block, entry, block_size // ratio), -1))
    num_ratios = len(ratios)
    per_ratio = (torch.cat(x).view(num_ratios, num_rows) for x in (visible, ends, entries))
    visible, ends, entries = per_ratio
    return (
        seq.int(),
        positions.int(),
        slots,
        preceding,
        following,
        ring_index,
        window_records,
        visible.int(),
        ends,
        entries,
    )
