"""Products of rows with bfloat16 weights."""

from __future__ import annotations

import torch
from torch import Tensor

from tilelang_ops.common.dispatch import backend


def linear(x: Tensor, weight: Tensor, dtype: torch.dtype, *, num_parts: int = 1) -> Tensor:
    """`x @ weight.T`: float32 sums of exact products, rounded once.

    Args:
        x: [m, width] bfloat16, width a multiple of 8.
        weight: [n, width] bfloat16, or [num_parts * n, width] of `packing.split_float32`.
        dtype: of the result, bfloat16 or float32.
        num_parts: terms that the weight is the sum of.

    Returns:
        [m, n] `dtype`. A row's bits do not depend on the other rows.
    """
    assert x.dtype == weight.dtype == torch.bfloat16 and x.shape[1] == weight.shape[1], (
        f"{x.shape=} {weight.shape=}"
    )
    assert x.shape[1] % 8 == 0 and weight.shape[0] % num_parts == 0, f"{x.shape=} {weight.shape=}"
    if x.shape[0] == 0:
        return x.new_empty(0, weight.shape[0] // num_parts, dtype=dtype)
    return backend(__package__, x.device).run(x, weight, dtype, num_parts)
