"""Torch meaning of `gather_slots`; empty places take slot 0."""

from __future__ import annotations

from torch import Tensor


def run(rows: Tensor, weights: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    slot = slots.long().clamp(min=0)
    return rows[slot // weights.shape[1]], weights.view(-1)[slot]
