"""Torch meaning of `advance_norm`: the operators that it fuses, one after the other."""

from __future__ import annotations

from torch import Tensor

from tilelang_ops.common.numerics import decode_fp8, encode_fp8
from tilelang_ops.hyper_connection.advance_norm.op import Advanced
from tilelang_ops.hyper_connection.advance_streams import reference as advance_streams
from tilelang_ops.moe.combine_slots.op import SlotOutputs
from tilelang_ops.norm.rms_norm import reference as rms_norm


def run(
    streams: Tensor,
    pre: Tensor,
    weight: Tensor,
    eps: float,
    output: Tensor | SlotOutputs | None,
    post: Tensor | None,
    comb: Tensor | None,
    keeps_values: bool,
    quantizes: bool,
    rounds: bool = False,
) -> Advanced:
    if isinstance(output, SlotOutputs):
        output = output.combined()
    streams, collapsed, mean_square = advance_streams.run(streams, pre, output, post, comb)
    values = rms_norm.run(collapsed, weight, eps)
    codes, scales = encode_fp8(values) if quantizes else (None, None)
    rounded = decode_fp8(*encode_fp8(values)).to(values.dtype) if rounds else None
    return Advanced(streams, mean_square, values if keeps_values else None, codes, scales, rounded)
