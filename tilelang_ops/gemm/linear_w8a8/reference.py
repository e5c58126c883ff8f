"""Torch meaning of `linear_w8a8`."""

from __future__ import annotations

import torch
from torch import Tensor

from tilelang_ops.common.dense_packing import unpack_units
from tilelang_ops.common.row_codes import decode_units


def run(codes: Tensor, scales: Tensor, weight: Tensor, weight_scales: Tensor) -> Tensor:
    rows = decode_units(codes, scales).unflatten(1, (weight.shape[0], -1))
    unpacked = unpack_units(weight, weight_scales)
    return torch.einsum("mgk,gnk->mgn", rows, unpacked).flatten(1).bfloat16()
