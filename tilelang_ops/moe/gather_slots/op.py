"""The inputs of the experts: rows and their routing weights in the order of the experts."""

from __future__ import annotations

import torch
from torch import Tensor

from tilelang_ops.common.dispatch import backend
from tilelang_ops.common.row_codes import RowCodes


def gather_slots(rows: Tensor | RowCodes, weights: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    """`rows[slots[i] // k]` and the weight of slot `slots[i]`.

    Args:
        rows: [n, width] of any dtype of 2 or 4 bytes, contiguous, width a multiple of 32; or by their codes.
        weights: [n, k] float32, contiguous.
        slots: [places] int32 as `group_rows` makes them; -1 where a place is empty, whose result is open.

    Returns:
        [places, width] of the dtype of `rows`, bfloat16 of codes, and [places] float32.
    """
    table = rows.codes if isinstance(rows, RowCodes) else rows
    assert table.is_contiguous() and weights.is_contiguous(), f"{table.stride()=} {weights.stride()=}"
    assert table.shape[0] == weights.shape[0] and table.shape[1] % 32 == 0, f"{table.shape=} {weights.shape=}"
    if slots.shape[0] == 0:
        dtype = torch.bfloat16 if isinstance(rows, RowCodes) else rows.dtype
        return table.new_empty(0, table.shape[1], dtype=dtype), weights.new_empty(0)
    return backend(__package__, table.device).run(rows, weights, slots)
