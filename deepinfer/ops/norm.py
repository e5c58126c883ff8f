"""Root-mean-square normalisation with one rounding."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.ops.cpu import context, is_bfloat16, require_cpu


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`(x * 1 / sqrt(mean(x^2) + eps)) * weight` in float32, rounded once to the dtype of x.

    A row's bits depend on that row alone.

    Args:
        x: [..., n] float32 or bfloat16.
        weight: [n] float32, contiguous.
        eps: added to the mean of squares.

    Returns:
        [..., n], contiguous, the dtype of x.
    """
    assert weight.shape == x.shape[-1:] and weight.is_contiguous(), f"{x.shape=} {weight.shape=}"
    require_cpu("rms_norm", x, weight)
    width = x.shape[-1]
    if x.dim() != 2 or x.stride(1) != 1:
        x = x.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype)
    row_stride = x.stride(0) if x.dim() == 2 else width
    num_rows = x.numel() // width if width else 0
    context().rms_norm(
        x.data_ptr(), is_bfloat16(x), row_stride, weight.data_ptr(), eps, out.data_ptr(), num_rows, width
    )
    return out


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype = torch.float32) -> Tensor:
    """The meaning of `rms_norm` before its rounding, computed in `dtype`."""
    wide = x.to(dtype)
    return wide * (1.0 / torch.sqrt(wide.square().mean(-1, keepdim=True) + eps)) * weight.to(dtype)
