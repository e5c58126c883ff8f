"""Rounding of activations to the release's FP8 grid in front of products with quantised matrices."""

from __future__ import annotations

import torch
from torch import Tensor

GROUP = 32  # channels that share one scale
E4M3_MAX = 448.0
MIN_AMAX = 1e-4  # floor of a group's largest magnitude


def round_activations(x: Tensor) -> Tensor:
    """The values that `x` takes as E4M3 codes with power-of-two scales over groups of 32 channels.

    Args:
        x: [..., K] float32 or bfloat16, K a multiple of 32.

    Returns:
        `x`'s shape and dtype; every value is exact in bfloat16.
    """
    assert x.shape[-1] % GROUP == 0, f"{x.shape=} is not a multiple of {GROUP} channels"
    groups = x.float().unflatten(-1, (-1, GROUP))
    amax = groups.abs().amax(-1, keepdim=True).clamp_min(MIN_AMAX)
    mantissa, exponent = torch.frexp(amax / E4M3_MAX)  # mantissa in [0.5, 1): a power of two is exactly 0.5
    scale = torch.ldexp(torch.ones_like(amax), exponent - (mantissa == 0.5).int())
    codes = (groups / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return (codes.float() * scale).flatten(-2).to(x.dtype)
