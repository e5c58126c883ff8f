"""The gated activation of an expert, encoded for its second product."""

from __future__ import annotations

import torch
from torch import Tensor

from tilelang_ops.common.dispatch import backend
from tilelang_ops.common.row_codes import RowCodes


def swiglu_quantize(
    gate_up: Tensor,
    limit: float,
    weight: Tensor | None = None,
    slots: Tensor | None = None,
    *,
    in_units: bool = False,
) -> tuple[Tensor, Tensor]:
    """A fusion: `swiglu` in the dtype of `gate_up`, then FP8.

    Args:
        gate_up: [n, 2 * width] float32 or bfloat16, contiguous: the gate, then the up projection; width a
            multiple of 32.
        limit: bound of the activations; the gate has none below.
        weight: float32, one factor for each row ([n]), or for each slot where there are `slots`; None for 1.
        slots: [n] int32 as `group_rows` makes them: row i takes the weight of slot `slots[i]`; the result of
            a row whose slot is -1 is open.
        in_units: encode for products in FP8, width a multiple of 128.

    Returns:
        codes [n, width] and scales [n, width / 32] uint8, or codes and scales of a `row_codes.RowCodes`.
    """
    num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    assert gate_up.is_contiguous() and gate_up.shape[1] % 64 == 0 and limit > 0, f"{gate_up.shape=} {limit=}"
    assert slots is None or (weight is not None and slots.shape == (num_rows,)), f"{gate_up.shape=}"
    assert weight is None or slots is not None or weight.numel() == num_rows, f"{weight.shape=}"
    if num_rows == 0:
        empty = RowCodes.empty(0, width, gate_up.device)
        scales = torch.empty(0, width // 32, dtype=torch.uint8, device=gate_up.device)
        return empty.codes, empty.scales if in_units else scales
    return backend(__package__, gate_up.device).run(gate_up, limit, weight, slots, in_units)
