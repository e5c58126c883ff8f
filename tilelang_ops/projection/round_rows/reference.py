"""Torch meaning of `round_rows`."""

from __future__ import annotations

from torch import Tensor

from tilelang_ops.common.numerics import decode_fp8, decode_mxfp4, encode_fp8, encode_mxfp4
from tilelang_ops.projection.encode_rows.op import Rotation
from tilelang_ops.projection.rotate import reference as rotate

CODECS = {"fp8": (encode_fp8, decode_fp8), "mxfp4": (encode_mxfp4, decode_mxfp4)}


def run(x: Tensor, format: str, rotation: Rotation | None) -> Tensor:
    if rotation is not None:
        x = x.clone()
        rotate.run(x, rotation.cos, rotation.sin, rotation.inverse)
    encode, decode = CODECS[format]
    return decode(*encode(x)).to(x.dtype)
