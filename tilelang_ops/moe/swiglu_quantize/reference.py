"""Torch meaning of `swiglu_quantize`: what it fuses, one after the other."""

from __future__ import annotations

from torch import Tensor

from tilelang_ops.common.numerics import encode_fp8
from tilelang_ops.moe.swiglu import reference as swiglu


def run(gate_up: Tensor, limit: float, weight: Tensor | None, slots: Tensor | None) -> tuple[Tensor, Tensor]:
    if weight is not None:
        weight = weight.reshape(-1)
        weight = weight if slots is None else weight[slots.long().clamp(min=0)]
    return encode_fp8(swiglu.run(gate_up, limit, gate_up.dtype, weight))
