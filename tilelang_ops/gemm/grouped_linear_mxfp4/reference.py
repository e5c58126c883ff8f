"""Torch meaning of `grouped_linear_mxfp4`."""

from __future__ import annotations

import torch
from torch import Tensor

from tilelang_ops.common.packing import unpack_mxfp4


def run(
    x: Tensor, weights: Tensor, offsets: Tensor, columns: int, dtype: torch.dtype = torch.float32
) -> Tensor:
    unpacked = unpack_mxfp4(weights)[:, :columns, : x.shape[1]].to(dtype)
    bounds = offsets.tolist()
    out = x.new_zeros(x.shape[0], columns)
    for weight, first, end in zip(unpacked, bounds, bounds[1:], strict=False):
        out[first:end] = (x[first:end].to(dtype) @ weight.T).to(x.dtype)
    return out
