"""Encode rows for products in FP8, rotated on the way where asked for."""

from __future__ import annotations

from math import prod

from torch import Tensor

from tilelang_ops.common.dispatch import backend
from tilelang_ops.common.row_codes import RowCodes
from tilelang_ops.projection.encode_rows.op import Rotation


def encode_units(x: Tensor, *, rotation: Rotation | None = None) -> RowCodes:
    """`rotate` where asked for, then `row_codes.encode_units`.

    The vectors are rounded to the dtype of x behind the rotation.

    Args:
        x: [n, ..., width] float32 or bfloat16, contiguous, width a multiple of 32, in kernels one of
            128 where there are several vectors; not changed.
        rotation: as in `encode_rows`; None leaves it out.

    Returns:
        codes of [n, all vectors of a row].
    """
    assert x.is_contiguous() and x.shape[-1] % 32 == 0, f"{x.shape=} {x.stride()=}"
    if rotation is not None:
        cos, sin = rotation.cos, rotation.sin
        assert cos.shape == sin.shape and cos.shape[0] == x.shape[0], f"{x.shape=} {cos.shape=} {sin.shape=}"
        assert 2 * cos.shape[1] <= x.shape[-1] and cos.shape[1] % 4 == 0, f"{x.shape=} {cos.shape=}"
    if x.numel() == 0:
        return RowCodes.empty(x.shape[0], prod(x.shape[1:]), x.device)
    return backend(__package__, x.device).run(x, rotation)
