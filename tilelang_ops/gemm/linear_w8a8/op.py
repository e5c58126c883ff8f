"""Products of FP8 rows with FP8 weights, by their codes."""

from __future__ import annotations

import torch
from torch import Tensor

from tilelang_ops.common.dispatch import backend
from tilelang_ops.common.row_codes import UNIT, scale_shape


def linear_w8a8(
    codes: Tensor,
    scales: Tensor,
    weight: Tensor,
    weight_scales: Tensor,
    *,
    num_groups: int = 1,
) -> Tensor:
    """`out[:, g] = x[:, g] @ w[g].T` of the values that codes and scales mean, rounded once.

    Tensor cores sum 32 channels with fewer bits than float32 has (doc/kernels.md); all else is float32.

    Args:
        codes: [m, num_groups * k] uint8, k a multiple of 32, and
        scales: of `row_codes.RowCodes`; both contiguous.
        weight: [num_groups, n, k] uint8 and
        weight_scales: [num_groups, ..] float32 of `dense_packing.pack_units`.
        num_groups: groups of channels, each with its own weights; k is a multiple of 128 where there are
            several.

    Returns:
        [m, num_groups * n] bfloat16. A row's bits do not depend on the other rows.
    """
    (num_rows, width), (groups, columns, k) = codes.shape, weight.shape
    assert groups == num_groups and width == num_groups * k and k % 32 == 0, f"{codes.shape=} {weight.shape=}"
    assert num_groups == 1 or k % UNIT == 0, f"{num_groups=} {k=}"
    assert scales.shape == scale_shape(num_rows, width), f"{codes.shape=} {scales.shape=}"
    assert codes.is_contiguous() and scales.is_contiguous(), f"{codes.stride()=} {scales.stride()=}"
    shape = (num_groups, -(-k // UNIT), -(-columns // 128) * 4)
    assert weight_scales.shape == shape, f"{weight_scales.shape=}, not {shape}"
    if num_rows == 0:
        return codes.new_empty(0, num_groups * columns, dtype=torch.bfloat16)
    return backend(__package__, codes.device).run(codes, scales, weight, weight_scales)
