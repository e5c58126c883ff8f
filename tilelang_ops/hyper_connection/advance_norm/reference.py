"""Torch meaning of `advance_norm`: the operators that it fuses, one after the other."""

from __future__ import annotations

from torch import Tensor

from tilelang_ops.common.numerics import encode_fp8
from tilelang_ops.hyper_connection.advance_norm.op import Advanced
from tilelang_ops.hyper_connection.advance_streams import reference as advance_streams
from tilelang_ops.norm.rms_norm import reference as rms_norm


def run(
    streams: Tensor,
    pre: Tensor,
    weight: Tensor,
    eps: float,
    output: Tensor | None,
    post: Tensor | None,
    comb: Tensor | None,
    keeps_values: bool,
    quantizes: bool,
) -> Advanced:
    streams, collapsed, mean_square = advance_streams.run(streams, pre, output, post, comb)
    values = rms_norm.run(collapsed, weight, eps)
    codes, scales = encode_fp8(values) if quantizes else (None, None)
    return Advanced(streams, mean_square, values if keeps_values else None, codes, scales)
