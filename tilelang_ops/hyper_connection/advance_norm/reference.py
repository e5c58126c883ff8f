"""Torch meaning of `advance_norm`: the operators that it fuses, one after the other."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from tilelang_ops.common.numerics import decode_fp8, encode_fp8
from tilelang_ops.common.row_codes import RowCodes
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
    encoding: str,
) -> Advanced:
    if isinstance(output, SlotOutputs):
        output = output.combined()
    streams, collapsed, mean_square = advance_streams.run(streams, pre, output, post, comb)
    values = rms_norm.run(collapsed, weight, eps)
    kept = values if keeps_values else None
    advanced = Advanced(streams, mean_square, kept, None, None)
    if not encoding:
        return advanced
    if encoding == "units":
        return replace(advanced, units=RowCodes.encode(values))
    codes, scales = encode_fp8(values)
    if encoding == "codes":
        return replace(advanced, codes=codes, scales=scales)
    return replace(advanced, rounded=decode_fp8(codes, scales).to(values.dtype))
