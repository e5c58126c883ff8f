"""Torch meaning of `gather_codes`; empty places take slot 0."""

from __future__ import annotations

from torch import Tensor

from tilelang_ops.common.row_codes import SCALE_ROWS, RowCodes
from tilelang_ops.moe.gather_codes.op import GroupedCodes
from tilelang_ops.moe.group_rows import reference as group_rows


def run(rows: RowCodes, weights: Tensor, ids: Tensor, num_experts: int) -> GroupedCodes:
    grouped = group_rows.run(ids, num_experts, SCALE_ROWS)
    slots = grouped.slots.long().clamp(min=0)
    row = slots // ids.shape[1]
    gathered = RowCodes(rows.codes[row], rows.scales[:, row].contiguous())
    return GroupedCodes(gathered, weights.view(-1)[slots], grouped.places, grouped.offsets)
