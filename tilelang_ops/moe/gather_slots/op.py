"""The inputs of the experts: rows and their routing weights in the order of the experts."""

from __future__ import annotations

from torch import Tensor

from tilelang_ops.common.dispatch import backend


def gather_slots(rows: Tensor, weights: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    """`rows[slots[i] // k]` and the weight of slot `slots[i]`.

    Args:
        rows: [n, width] of any dtype of 2 or 4 bytes, contiguous, width a multiple of 32.
        weights: [n, k] float32, contiguous.
        slots: [places] int32 as `group_rows` makes them; -1 where a place is empty, whose result is open.

    Returns:
        [places, width] of the dtype of `rows`, and [places] float32.
    """
    assert rows.is_contiguous() and weights.is_contiguous(), f"{rows.stride()=} {weights.stride()=}"
    assert rows.shape[0] == weights.shape[0] and rows.shape[1] % 32 == 0, f"{rows.shape=} {weights.shape=}"
    if slots.shape[0] == 0:
        return rows.new_empty(0, rows.shape[1]), weights.new_empty(0)
    return backend(__package__, rows.device).run(rows, weights, slots)
