"""Torch meaning of `gather_dequantize`."""

from __future__ import annotations

import torch
from torch import Tensor

from tilelang_ops.common.numerics import decode_fp8


def run(table: Tensor, scales: Tensor | None, index: Tensor, dtype: torch.dtype) -> Tensor:
    flat = index.flatten()
    if scales is None:
        rows = table.index_select(0, flat)
    else:
        codes = table.view(torch.uint8).index_select(0, flat)
        rows = decode_fp8(codes, scales.view(torch.uint8).index_select(0, flat))
    return rows.to(dtype).view(*index.shape, table.shape[1])
