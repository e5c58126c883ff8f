"""The gated activation between the two products of an expert."""

from __future__ import annotations

import torch
from torch import Tensor

from tilelang_ops.common.dispatch import backend


def swiglu(
    gate_up: Tensor,
    limit: float,
    dtype: torch.dtype,
    weight: Tensor | None = None,
    *,
    rounds: bool = False,
) -> Tensor:
    """`silu(min(gate, limit)) * clamp(up, -limit, limit) * weight` in float32, rounded once.

    Args:
        gate_up: [n, 2 * width] float32 or bfloat16: the gate, then the up projection.
        limit: bound of the activations; the gate has none below.
        dtype: of the result, float32 or bfloat16.
        weight: [n] or [n, 1] float32, one factor for each row; None for 1.
        rounds: round the result, of the dtype of `gate_up` and its width a multiple of 32, to E4M3 in groups
            of 32 as `swiglu_quantize` encodes it.

    Returns:
        [n, width] `dtype`.
    """
    assert gate_up.shape[1] % 2 == 0 and limit > 0, f"{gate_up.shape=} {limit=}"
    run = backend(__package__, gate_up.device).run
    if not rounds:
        return run(gate_up, limit, dtype, weight)
    assert dtype == gate_up.dtype and gate_up.shape[1] % 64 == 0, (
        f"{gate_up.shape=} {gate_up.dtype=} {dtype=}"
    )
    return run(gate_up, limit, dtype, weight, rounds)
