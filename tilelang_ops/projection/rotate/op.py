"""Rotate the last channels of every vector by its position."""

from __future__ import annotations

from torch import Tensor

from tilelang_ops.common.dispatch import backend


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, inverse: bool = False) -> Tensor:
    """Turn adjacent channel pairs (2i, 2i + 1) of the last `2 m` channels by the row's angle i, in place.

    Products and sums are float32; the result is rounded to the dtype of x.

    Args:
        x: [n, ..., width] float32 or bfloat16, width even, contiguous; changed in place.
        cos, sin: [n, m] float32.
        inverse: turn back.

    Returns:
        x.
    """
    assert cos.shape == sin.shape == (x.shape[0], cos.shape[1]), f"{x.shape=} {cos.shape=} {sin.shape=}"
    assert x.shape[-1] % 2 == 0 and 2 * cos.shape[1] <= x.shape[-1], f"{x.shape=} {cos.shape=}"
    assert x.is_contiguous(), f"{x.stride()=}"
    if x.numel() > 0:
        backend(__package__, x.device).run(x, cos, sin, inverse)
    return x
