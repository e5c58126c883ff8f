"""Vectors that reach every corner of the record formats."""

from __future__ import annotations

import torch
from torch import Tensor

from tilelang_ops.common.numerics import E4M3


def corner_vectors(num_rows: int, width: int, dtype: torch.dtype) -> Tensor:
    """[num_rows, width]: normal rows, and rows with zeros of both signs, ties, values that saturate, tiny and
    huge ones, infinities and NaNs of both signs."""
    scale = 2.0 ** torch.randint(-8, 9, (num_rows, width // 16, 1)).float()
    x = (torch.randn(num_rows, width // 16, 16) * scale).reshape(num_rows, width)
    thresholds = torch.tensor([0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0])
    ties = thresholds[torch.randint(0, 15, (num_rows, width))] * torch.randn(num_rows, width).sign()
    e4m3 = torch.randint(1, 126, (num_rows, width // 16, 1)).to(torch.uint8).view(E4M3).float()
    ties = (ties.view(num_rows, -1, 16) * e4m3).view(num_rows, width)
    ties[:, ::16] = 6.0 * e4m3.squeeze(2)
    near = torch.nextafter(ties, torch.randn(num_rows, width).sign() * torch.inf)
    kinds = torch.arange(num_rows) % 8
    x[kinds == 1] = ties[kinds == 1]
    x[kinds == 2] = near[kinds == 2]
    x[kinds == 3] *= 1e-38
    x[kinds == 4] = (x[kinds == 4] * 1e36).clamp(-3e38, 3e38)
    x[kinds == 5] *= torch.randint(0, 2, (int((kinds == 5).sum()), width))
    faults = torch.tensor([torch.nan, -torch.nan, torch.inf, -torch.inf])
    for row in (kinds == 6).nonzero().flatten().tolist():
        places = torch.randint(0, width, (width // 24,))
        x[row, places] = faults[torch.randint(0, 4, places.shape)]
    return x.to(dtype)


def whole(view: Tensor) -> Tensor:
    """All elements of a view's storage."""
    size = view.untyped_storage().nbytes() // view.element_size()
    return torch.empty(0, dtype=view.dtype).set_(view.untyped_storage(), 0, (size,))
