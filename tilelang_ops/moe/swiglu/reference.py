"""Torch meaning of `swiglu`."""

from __future__ import annotations

import torch
from torch import Tensor

from tilelang_ops.common.numerics import silu


def run(gate_up: Tensor, limit: float, dtype: torch.dtype, weight: Tensor | None) -> Tensor:
    gate, up = gate_up.float().chunk(2, dim=1)
    # Contiguous halves: elementwise functions keep one code path whatever the number of rows.
    out = silu(gate.clamp(max=limit).contiguous()) * up.clamp(-limit, limit)
    if weight is not None:
        out = out * weight.view(-1, 1)
    return out.to(dtype)
