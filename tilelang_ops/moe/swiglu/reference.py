"""Torch meaning of `swiglu`."""

from __future__ import annotations

import torch
from torch import Tensor

from tilelang_ops.common.numerics import decode_fp8, encode_fp8, silu


def run(
    gate_up: Tensor, limit: float, dtype: torch.dtype, weight: Tensor | None, rounds: bool = False
) -> Tensor:
    gate, up = gate_up.float().chunk(2, dim=1)
    # Contiguous halves: elementwise functions keep one code path whatever the number of rows.
    out = silu(gate.clamp(max=limit).contiguous()) * up.clamp(-limit, limit)
    if weight is not None:
        out = out * weight.view(-1, 1)
    out = out.to(dtype)
    return decode_fp8(*encode_fp8(out)).to(dtype) if rounds else out
