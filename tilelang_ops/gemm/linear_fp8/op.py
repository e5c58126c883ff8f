"""Products of rows with FP8 weights."""

from __future__ import annotations

import torch
from torch import Tensor

from tilelang_ops.common.dispatch import backend


def linear_fp8(x: Tensor, weight: Tensor, columns: int, *, num_groups: int = 1) -> Tensor:
    """`out[:, g] = x[:, g] @ weight[g].T`: float32 sums of exact products, rounded once.

    Args:
        x: [m, num_groups * width] bfloat16, width a multiple of 32. Rows of quantised activations are rounded
            to E4M3 before.
        weight: [num_groups, ..] int32 of `packing.pack_fp8`.
        columns: weight rows of a group before padding.
        num_groups: groups of channels, each with its own weights.

    Returns:
        [m, num_groups * columns] bfloat16. A row's bits do not depend on the other rows.
    """
    assert x.dtype == torch.bfloat16 and x.shape[1] % (32 * num_groups) == 0, f"{x.dtype} {x.shape=}"
    steps = -(-x.shape[1] // num_groups // 64)
    assert weight.shape == (num_groups, -(-columns // 64), steps, 33, 32), f"{weight.shape=} {columns=}"
    assert num_groups == 1 or columns % 64 == 0, f"{num_groups=} {columns=}"
    if x.shape[0] == 0:
        return x.new_empty(0, num_groups * columns)
    return backend(__package__, x.device).run(x, weight, columns, num_groups)
