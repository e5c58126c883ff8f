"""Torch meaning of `linear`."""

from __future__ import annotations

import torch
from torch import Tensor


def run(
    x: Tensor, weight: Tensor, dtype: torch.dtype, num_parts: int, precision: torch.dtype = torch.float32
) -> Tensor:
    whole = weight.to(precision).unflatten(0, (num_parts, -1)).sum(0)
    return (x.to(precision) @ whole.T).to(dtype)
