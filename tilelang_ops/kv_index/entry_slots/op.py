"""Record numbers of compressed entries, through the block tables."""

from __future__ import annotations

from torch import Tensor

from tilelang_ops.common.dispatch import backend


def entry_slots(entries: Tensor, row_seq: Tensor, block_tables: Tensor, entries_per_block: int) -> Tensor:
    """Where the entries of each row's sequence lie: physical block * entries_per_block + place; -1 stays.

    Args:
        entries: [n, k] int32 or int64 entry numbers, -1 for none.
        row_seq: [n] sequence of each row.
        block_tables: [num_seqs, max_blocks] int32.
        entries_per_block: entries of a block.

    Returns:
        [n, k] int32.
    """
    assert entries.shape[0] == row_seq.shape[0], f"{entries.shape=} {row_seq.shape=}"
    if entries.numel() == 0:
        return entries.int()
    return backend(__package__, entries.device).run(entries, row_seq, block_tables, entries_per_block)
