"""Torch meaning of `gather_grouped`: what it fuses, one after the other."""

from __future__ import annotations

from torch import Tensor

from tilelang_ops.common.row_codes import RowCodes
from tilelang_ops.moe.gather_grouped.op import GroupedInputs
from tilelang_ops.moe.gather_slots import reference as gather_slots
from tilelang_ops.moe.group_rows import reference as group_rows


def run(rows: Tensor | RowCodes, weights: Tensor, ids: Tensor, num_experts: int) -> GroupedInputs:
    grouped = group_rows.run(ids, num_experts, 1)
    gathered, factors = gather_slots.run(rows, weights, grouped.slots)
    return GroupedInputs(gathered, factors, grouped.places, grouped.offsets)
