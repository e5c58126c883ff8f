"""Torch meaning of `norm_quantize`: what it fuses, one after the other."""

from __future__ import annotations

from torch import Tensor

from tilelang_ops.common.numerics import decode_fp8, encode_fp8
from tilelang_ops.common.row_codes import RowCodes
from tilelang_ops.norm.norm_quantize.op import Normed
from tilelang_ops.norm.rms_norm import reference as rms_norm


def run(
    x: Tensor,
    weight: Tensor,
    eps: float,
    residual: Tensor | None,
    keeps_values: bool,
    encoding: str = "codes",
) -> Normed:
    total = None if residual is None else (x.float() + residual.float()).to(x.dtype)
    values = rms_norm.run(x if total is None else total, weight, eps)
    kept = values if keeps_values else None
    codes, scales = encode_fp8(values)
    if encoding == "units":
        return Normed(kept, None, None, total, units=RowCodes.encode(values))
    if encoding == "rounded":
        return Normed(kept, None, None, total, decode_fp8(codes, scales).to(x.dtype))
    return Normed(kept, codes, scales, total)
