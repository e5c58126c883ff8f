"""The gated activation between the two products of an expert."""

from __future__ import annotations

import torch
from torch import Tensor

from tilelang_ops.common.dispatch import backend


def swiglu(gate_up: Tensor, limit: float, dtype: torch.dtype, weight: Tensor | None = None) -> Tensor:
    """`silu(min(gate, limit)) * clamp(up, -limit, limit) * weight` in float32, rounded once.

    Args:
        gate_up: [n, 2 * width] float32 or bfloat16: the gate, then the up projection.
        limit: bound of the activations; the gate has none below.
        dtype: of the result, float32 or bfloat16.
        weight: [n] or [n, 1] float32, one factor for each row; None for 1.

    Returns:
        [n, width] `dtype`.
    """
    assert gate_up.shape[1] % 2 == 0 and limit > 0, f"{gate_up.shape=} {limit=}"
    return backend(__package__, gate_up.device).run(gate_up, limit, dtype, weight)
