"""Inputs of the drafter's block: the anchor and noise tokens behind it.

    position          a - window ... a - 1      a        a + 1 ... a + block - 1
    record            context                   anchor   noise

Every row of a block sees all of these records, those behind it included.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from tilelang_ops.common.dispatch import backend


class DraftInputs(NamedTuple):
    """n sequences, B rows of each: the first rows of all sequences, then their second ones, and so on."""

    input_ids: Tensor  # [B * n] int32
    positions: Tensor  # [B * n] int32
    ring_index: Tensor  # [B * n] int64 record of each row in the rings
    window_index: Tensor  # [B * n, window + B] int32 records that each row sees, ascending; -1 in front


def draft_inputs(
    anchors: Tensor,
    positions: Tensor,
    state_slots: Tensor,
    *,
    block_size: int,
    window: int,
    ring: int,
    noise_token_id: int,
) -> DraftInputs:
    """Ids, positions and records of the blocks' rows.

    Args:
        anchors: [n] int32 token that was chosen last.
        positions: [n] int32 of the anchors.
        state_slots: [n] int32.
        block_size: B.
        window: context positions that a block sees.
        ring: records of a ring, `window + block_size` at least.
        noise_token_id: fills the block behind the anchor.
    """
    assert anchors.shape == positions.shape == state_slots.shape, f"{anchors.shape=} {positions.shape=}"
    assert anchors.numel() > 0 and ring >= window + block_size, f"{anchors.shape=} {ring=}"
    return DraftInputs(
        *backend(__package__, anchors.device).run(
            anchors, positions, state_slots, block_size, window, ring, noise_token_id
        )
    )
