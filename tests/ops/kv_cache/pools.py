"""Strided pools for tests of the cache operators."""

from __future__ import annotations

import torch
from torch import Tensor


def make_pool(
    parts: int, records: int, fields: int, dtype: torch.dtype, gap: int, offset: int
) -> tuple[Tensor, Tensor]:
    """A buffer of noise, and a pool in it at element `offset` with parts `records + gap` records apart."""
    size = offset + parts * (records + gap) * fields
    if dtype == torch.uint8:
        buffer = torch.randint(0, 256, (size,), dtype=torch.uint8)
    else:
        buffer = torch.randn(size)
    return buffer, buffer.as_strided((parts, records, fields), ((records + gap) * fields, fields, 1), offset)
