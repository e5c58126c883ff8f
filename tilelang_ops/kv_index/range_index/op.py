"""Record numbers of runs of consecutive entries or positions, one run of each sequence, back to back."""

from __future__ import annotations

import torch
from torch import Tensor

from tilelang_ops.common.dispatch import backend


def paged_range_index(
    cu_lens: Tensor, firsts: Tensor, block_tables: Tensor, total: int, entries_per_block: int
) -> Tensor:
    """Entries `firsts[s] ... firsts[s] + len_s - 1` of every sequence, through the block tables.

    Args:
        cu_lens: [num_seqs + 1] int32 sums of the runs' lengths, from 0.
        firsts: [num_seqs] int32; a negative entry has no record.
        block_tables: [num_seqs, max_blocks] int32.
        total: records to list; -1 behind the last run.
        entries_per_block: entries of a block.

    Returns:
        [total] int64.
    """
    assert cu_lens.shape[0] == firsts.shape[0] + 1 == block_tables.shape[0] + 1, f"{cu_lens.shape=}"
    if total == 0:
        return torch.empty(0, dtype=torch.int64, device=cu_lens.device)
    return backend(__package__, cu_lens.device).run(
        cu_lens, firsts, block_tables, total, entries_per_block, True
    )


def ring_range_index(cu_lens: Tensor, firsts: Tensor, state_slots: Tensor, total: int, ring: int) -> Tensor:
    """Positions `firsts[s] ... firsts[s] + len_s - 1` of every sequence, in the rings of state slots.

    Args:
        cu_lens: [num_seqs + 1] int32 sums of the runs' lengths, from 0.
        firsts: [num_seqs] int32; a negative position has no record.
        state_slots: [num_seqs] int32.
        total: records to list; -1 behind the last run.
        ring: records of a ring.

    Returns:
        [total] int64.
    """
    assert cu_lens.shape[0] == firsts.shape[0] + 1 == state_slots.shape[0] + 1, f"{cu_lens.shape=}"
    if total == 0:
        return torch.empty(0, dtype=torch.int64, device=cu_lens.device)
    return backend(__package__, cu_lens.device).run(
        cu_lens, firsts, state_slots.view(-1, 1), total, ring, False
    )
