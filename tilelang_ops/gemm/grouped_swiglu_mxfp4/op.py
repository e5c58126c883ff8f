"""The first product of the experts with the gated activation behind it."""

from __future__ import annotations

import torch
from torch import Tensor

from tilelang_ops.common.dispatch import backend


def grouped_swiglu_mxfp4(
    x: Tensor,
    weights: Tensor,
    offsets: Tensor,
    factors: Tensor,
    limit: float,
    inner: int,
    *,
    round_output: bool,
) -> Tensor:
    """`silu(min(g, limit)) * clamp(u, -limit, limit) * factors[r]`, (g, u) = weights[expert of r] @ x[r].

    The products round to bfloat16, the activation is float32 and rounds to bfloat16.

    Args:
        x: [m, width] bfloat16, width a multiple of 32; rows offsets[e] .. offsets[e + 1] - 1 are expert e's.
        weights: [experts, ..] int32 of `packing.pack_mxfp4(.., gated=True)`.
        offsets: [experts + 1] int32, ascending from 0 to m at most; the output of rows behind is undefined.
        factors: [m] float32, the routing weights of the sorted rows.
        limit: bound of the activations; infinity for none.
        inner: channels of the output, a multiple of 32.
        round_output: round the result to E4M3 in groups of 32, for the second product.

    Returns:
        [m, inner] bfloat16. A row's bits do not depend on the other rows.
    """
    assert x.dtype == torch.bfloat16 and x.shape[1] % 32 == 0 and inner % 32 == 0, f"{x.dtype} {x.shape=}"
    shape = (offsets.shape[0] - 1, inner // 32, -(-x.shape[1] // 64), 17, 32)
    assert weights.shape == shape and offsets.dtype == torch.int32, f"{weights.shape=}, not {shape}"
    assert factors.shape == x.shape[:1] and factors.dtype == torch.float32 and limit > 0, f"{factors.shape=}"
    if x.shape[0] == 0:
        return x.new_empty(0, inner)
    return backend(__package__, x.device).run(x, weights, offsets, factors, limit, inner, round_output)
