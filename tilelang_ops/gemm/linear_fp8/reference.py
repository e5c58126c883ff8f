"""Torch meaning of `linear_fp8`."""

from __future__ import annotations

import torch
from torch import Tensor

from tilelang_ops.common.packing import unpack_fp8


def run(x: Tensor, weight: Tensor, columns: int, num_groups: int) -> Tensor:
    width = x.shape[1] // num_groups
    unpacked = unpack_fp8(weight)[:, :columns, :width].float()
    rows = x.float().unflatten(1, (num_groups, width))
    return torch.einsum("mgk,gnk->mgn", rows, unpacked).flatten(1).to(x.dtype)
