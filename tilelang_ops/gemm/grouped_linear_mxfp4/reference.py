"""Torch meaning of `grouped_linear_mxfp4`."""

from __future__ import annotations

from torch import Tensor

from tilelang_ops.common.packing import unpack_mxfp4


def run(x: Tensor, weights: Tensor, offsets: Tensor, columns: int) -> Tensor:
    unpacked = unpack_mxfp4(weights)[:, :columns, : x.shape[1]].float()
    bounds = offsets.tolist()
    out = x.new_zeros(x.shape[0], columns)
    for weight, first, end in zip(unpacked, bounds, bounds[1:], strict=False):
        out[first:end] = (x[first:end].float() @ weight.T).to(x.dtype)
    return out
