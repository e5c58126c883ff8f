"""Torch meaning of `gather_rows`."""

from __future__ import annotations

import torch
from torch import Tensor


def run(src: Tensor, index: Tensor, divisor: int) -> Tensor:
    row = index.flatten().long().div(divisor, rounding_mode="floor")
    inside = (row >= 0) & (row < src.shape[0])
    rows = src.index_select(0, torch.where(inside, row, 0))
    rows[~inside] = 0
    return rows.view(*index.shape, src.shape[1])
