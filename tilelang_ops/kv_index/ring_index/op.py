"""Record numbers of positions in the rings of state slots."""

from __future__ import annotations

import torch
from torch import Tensor

from tilelang_ops.common.dispatch import backend


def ring_index(state_slots: Tensor, positions: Tensor, ring: int) -> Tensor:
    """Where the record of each position lies: slot * ring + place in the ring.

    Args:
        state_slots: [n] int32 or int64.
        positions: [n] int32, not negative.
        ring: records of a ring.

    Returns:
        [n] int64.
    """
    assert state_slots.shape == positions.shape, f"{state_slots.shape=} {positions.shape=}"
    if positions.numel() == 0:
        return torch.empty(0, dtype=torch.int64, device=positions.device)
    return backend(__package__, positions.device).run(state_slots, positions, ring)
