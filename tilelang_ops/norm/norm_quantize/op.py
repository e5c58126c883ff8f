"""Normalise rows and quantise them for the products that follow."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from tilelang_ops.common.dispatch import backend
from tilelang_ops.common.row_codes import RowCodes

ENCODINGS = ("codes", "rounded", "units")


@dataclass(frozen=True)
class Normed:
    """Normalised rows, in the forms that were asked for.

    Attributes:
        values: [n, width] the dtype of the input.
        codes: [n, width] uint8, `values` in E4M3, and
        scales: [n, width / 32] uint8, E8M0; both as `numerics.encode_fp8` makes them.
        total: [n, width] input plus residual, rounded; the next residual.
        rounded: [n, width] what `codes` and `scales` mean, in the dtype of the input.
        units: what `rounded` becomes for products in FP8.
    """

    values: Tensor | None
    codes: Tensor | None
    scales: Tensor | None
    total: Tensor | None
    rounded: Tensor | None = None
    units: RowCodes | None = None


def norm_quantize(
    x: Tensor,
    weight: Tensor,
    eps: float,
    residual: Tensor | None = None,
    *,
    keeps_values: bool = False,
    encoding: str = "codes",
) -> Normed:
    """A fusion: add the residual where there is one, `rms_norm`, then encode as FP8.

    The sum is rounded before it is normalised, the normalised value before it is encoded.

    Args:
        x: [n, width] float32 or bfloat16, width a multiple of 32; contiguous, or columns of such rows.
        weight: [width] float32.
        eps: added to the mean of squares.
        residual: like x, or None.
        keeps_values: hand out the normalised values as well.
        encoding: what to hand out: "codes" with scales, "rounded" or "units", for these the width is a
            multiple of 128.

    Returns:
        one of the encodings; values if kept; total if there is a residual.
    """
    assert x.dim() == 2 and x.stride(1) == 1 and x.shape[1] % 32 == 0, f"{x.shape=} {x.stride()=}"
    assert weight.shape == x.shape[1:] and weight.is_contiguous(), f"{x.shape=} {weight.shape=}"
    assert residual is None or (residual.shape == x.shape and residual.dtype == x.dtype), f"{x.shape=}"
    assert encoding in ENCODINGS, f"{encoding=} is none of {ENCODINGS}"
    return backend(__package__, x.device).run(x, weight, eps, residual, keeps_values, encoding)
