"""Everything that the layers of a decode step derive from lengths, in one pass."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from tilelang_ops.common.dispatch import backend


class DecodeMetadata(NamedTuple):
    """Q rows, R ratios. A row behind the last sequence belongs to sequence and slot 0 and sees nothing.

    A group of `ratio` tokens that ends at a row makes a compressed entry; no shape depends on how many do.
    """

    row_seq: Tensor  # [Q] int32 sequence
    positions: Tensor  # [Q] int32 in the sequence
    slots: Tensor  # [Q] int64 state slot
    preceding: Tensor  # [Q] int64 rows of the same sequence before the row
    following: Tensor  # [Q] int64 and behind it
    ring_index: Tensor  # [Q] int64 record in the window rings; -1 where a later row takes its place
    window_index: Tensor  # [Q, window] int32 records of the window, ascending; -1 before the sequence
    num_visible: Tensor  # [R, Q] int32 compressed entries that the row sees
    group_ends: Tensor  # [R, Q] int64 the row itself where a group ends at it, else -1
    group_slots: Tensor  # [R, Q] int64 record of the group's entry in its owner's pools, else -1


def decode_metadata(
    cu_seqlens_q: Tensor,
    seqlens_k: Tensor,
    state_slots: Tensor,
    block_tables: Tensor,
    num_rows: int,
    *,
    window: int,
    ring: int,
    block_size: int,
    ratios: tuple[int, ...],
) -> DecodeMetadata:
    """Positions, slots and records of the rows of a decode step.

    Args:
        cu_seqlens_q: [num_seqs + 1] int32 sums of the sequences' rows.
        seqlens_k: [num_seqs] int32 tokens of each sequence, its rows included.
        state_slots: [num_seqs] int32.
        block_tables: [num_seqs, max_blocks] int32.
        num_rows: Q; rows behind the last sequence are padding.
        window: tokens that a row sees, itself included.
        ring: records of a window ring.
        block_size: tokens of a paged block, a multiple of every ratio.
        ratios: tokens of an entry, of each kind of layer.
    """
    num_seqs = seqlens_k.shape[0]
    assert cu_seqlens_q.shape[0] == num_seqs + 1 and block_tables.shape[0] == num_seqs > 0, (
        f"{cu_seqlens_q.shape=} {seqlens_k.shape=} {block_tables.shape=}"
    )
    assert num_rows > 0 and all(block_size % ratio == 0 for ratio in ratios), f"{num_rows=} {ratios=}"
    return DecodeMetadata(
        *backend(__package__, seqlens_k.device).run(
            cu_seqlens_q, seqlens_k, state_slots, block_tables, num_rows, window, ring, block_size, ratios
        )
    )
