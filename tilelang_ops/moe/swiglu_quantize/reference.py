"""Torch meaning of `swiglu_quantize`: what it fuses, one after the other."""

from __future__ import annotations

from torch import Tensor

from tilelang_ops.common.numerics import encode_fp8
from tilelang_ops.common.row_codes import encode_units
from tilelang_ops.moe.swiglu import reference as swiglu


def run(
    gate_up: Tensor, limit: float, weight: Tensor | None, slots: Tensor | None, in_units: bool = False
) -> tuple[Tensor, Tensor]:
    if weight is not None:
        weight = weight.reshape(-1)
        weight = weight if slots is None else weight[slots.long().clamp(min=0)]
    values = swiglu.run(gate_up, limit, gate_up.dtype, weight)
    return encode_units(values) if in_units else encode_fp8(values)
