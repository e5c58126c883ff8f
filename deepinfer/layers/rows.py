"""Rows of a tensor by number."""

from __future__ import annotations

import math

from torch import Tensor

from tilelang_ops.memory import gather_rows


def take_rows(x: Tensor, places: Tensor) -> Tensor:
    """`x[places]`: [n, ...] and [k] int32 or int64, each a row of x -> [k, ...]."""
    if x.is_cpu:
        return x.index_select(0, places)
    rows = x.reshape(x.shape[0], math.prod(x.shape[1:])).contiguous()  # columns of longer rows are copied
    return gather_rows(rows, places).view(places.shape[0], *x.shape[1:])
