"""Round row vectors to a number format in place of encoding them, for products that take rounded values."""

from __future__ import annotations

import torch
from torch import Tensor

from tilelang_ops.common.dispatch import backend
from tilelang_ops.projection.encode_rows.op import Rotation

FORMATS = ("fp8", "mxfp4")


def round_rows(x: Tensor, format: str = "fp8", *, rotation: Rotation | None = None) -> Tensor:
    """`rotate` where asked for, then what encoding the vectors and decoding them again gives.

    The vectors are rounded to the dtype of x behind the rotation; bfloat16 holds the result exactly.

    Args:
        x: [n, ..., width] float32 or bfloat16, contiguous, width a multiple of 32; not changed.
        format: "fp8" or "mxfp4".
        rotation: as in `encode_rows`; None leaves it out.

    Returns:
        [n, ..., width], contiguous, the dtype of x.
    """
    assert x.is_contiguous() and x.shape[-1] % 32 == 0, f"{x.shape=} {x.stride()=}"
    assert format in FORMATS, f"{format=} is none of {FORMATS}"
    if rotation is not None:
        cos, sin = rotation.cos, rotation.sin
        assert cos.shape == sin.shape and cos.shape[0] == x.shape[0], f"{x.shape=} {cos.shape=} {sin.shape=}"
        assert 2 * cos.shape[1] <= x.shape[-1] and cos.shape[1] % 4 == 0, f"{x.shape=} {cos.shape=}"
    if x.numel() == 0:
        return torch.empty_like(x)
    return backend(__package__, x.device).run(x, format, rotation)
