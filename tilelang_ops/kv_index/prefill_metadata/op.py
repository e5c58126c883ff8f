"""Everything that the layers of a prefill step derive from positions, in one pass.

Windows are read from a line of records: of each sequence `window - 1` records of history, copied from its
ring, then those of its rows.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from tilelang_ops.common.dispatch import backend


class PrefillMetadata(NamedTuple):
    """n rows, S sequences, R ratios.

    A group of `ratio` tokens that ends at a row makes a compressed entry; no shape depends on how many do.
    """

    slots: Tensor  # [n] int64 state slot
    preceding: Tensor  # [n] int64 rows of the same sequence before the row
    following: Tensor  # [n] int64 and behind it
    ring_index: Tensor  # [n] int64 record in the rings; -1 where a later row takes its place or none sees it
    line_index: Tensor  # [n] int64 record in the line
    window_index: Tensor  # [n, window] int32 records of the window in the line; -1 where there is none
    history_sources: Tensor  # [S * (window - 1)] int64 ring records that the line begins with; -1 for none
    history_targets: Tensor  # [S * (window - 1)] int64 their places in the line
    num_visible: Tensor  # [R, n] int32 compressed entries that the row sees
    group_ends: Tensor  # [R, n] int64 the row itself where a group ends at it, else -1
    group_slots: Tensor  # [R, n] int64 record of the group's entry in its owner's pools, else -1


def prefill_metadata(
    positions: Tensor,
    row_seq: Tensor,
    cu_rows: Tensor,
    state_slots: Tensor,
    block_tables: Tensor,
    *,
    window: int,
    ring: int,
    block_size: int,
    ratios: tuple[int, ...],
    window_starts: Tensor | None = None,
) -> PrefillMetadata:
    """Slots and records of rows in sequence order, those of a sequence consecutive positions.

    Args:
        positions: [n] int32 in the sequence.
        row_seq: [n] int32 sequence.
        cu_rows: [num_seqs + 1] int32 sums of the sequences' rows, from 0 to n.
        state_slots: [num_seqs] int32.
        block_tables: [num_seqs, max_blocks] int32.
        window: tokens that a row sees, itself included.
        ring: records of a window ring.
        block_size: tokens of a paged block, a multiple of every ratio.
        ratios: tokens of an entry, of each kind of layer.
        window_starts: [num_seqs] int32 first position that windows see and rings receive; None for all.
    """
    num_seqs = state_slots.shape[0]
    assert positions.shape == row_seq.shape and positions.numel() > 0, f"{positions.shape=} {row_seq.shape=}"
    assert cu_rows.shape[0] == num_seqs + 1 and block_tables.shape[0] == num_seqs, f"{cu_rows.shape=}"
    assert all(block_size % ratio == 0 for ratio in ratios), f"{block_size=} {ratios=}"
    lists = cu_rows, state_slots, block_tables, window_starts
    return PrefillMetadata(
        *backend(__package__, positions.device).run(
            positions, row_seq, *lists, window, ring, block_size, ratios
        )
    )
