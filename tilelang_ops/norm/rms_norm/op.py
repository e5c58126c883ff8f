"""Root-mean-square normalisation with one rounding."""

from __future__ import annotations

import torch
from torch import Tensor

from tilelang_ops.common.dispatch import backend


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x * (1 / sqrt(mean(x^2) + eps)) * weight` in float32, rounded once to the dtype of x.

    A row's bits depend on that row alone.

    Args:
        x: [..., width] float32 or bfloat16.
        weight: [width] float32, contiguous.
        eps: added to the mean of squares.

    Returns:
        [..., width], contiguous, the dtype of x.
    """
    assert weight.shape == x.shape[-1:] and weight.is_contiguous(), f"{x.shape=} {weight.shape=}"
    if x.numel() == 0:
        return torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return backend(__package__, x.device).run(x, weight, eps)
