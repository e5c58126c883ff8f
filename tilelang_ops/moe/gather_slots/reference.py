"""Torch meaning of `gather_slots`; empty places take slot 0."""

from __future__ import annotations

from torch import Tensor

from tilelang_ops.common.row_codes import RowCodes


def run(rows: Tensor | RowCodes, weights: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    slot = slots.long().clamp(min=0)
    values = rows.values() if isinstance(rows, RowCodes) else rows
    return values[slot // weights.shape[1]], weights.view(-1)[slot]
