"""Products of activations with weights, whose rows do not depend on the batch they stand in.

A library's product chooses its summation order by the shape of the batch. Here every output element is summed
in one order: lane k % 16 adds its channels in order of k with fused multiply-adds, then the sixteen lanes are
added as a tree. So a row has the same bits alone, in any batch, at any place and with any number of threads.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from deepinfer.ops.cpu import context, is_bfloat16, require_cpu
from deepinfer.ops.quant import round_fp8


def linear(
    x: Tensor,
    weight: Tensor,
    out_dtype: torch.dtype | None = None,
    *,
    round_inputs: bool = False,
    batch_invariant: bool = True,
) -> Tensor:
    """`x @ weight.T` with float32 accumulation and one rounding to the output's dtype.

    Args:
        x: [M, K] float32 or bfloat16; the last dimension contiguous.
        weight: [N, K] float32 or bfloat16, contiguous.
        out_dtype: float32 or bfloat16; `x.dtype` when None.
        round_inputs: round every row of `x` to E4M3 in groups of 32 channels first.
        batch_invariant: False lets the library choose the order, to measure what the fixed order costs.

    Returns:
        [M, N] `out_dtype`, contiguous.
    """
    num_rows, width = x.shape
    columns = weight.shape[0]
    assert weight.shape[1] == width and weight.is_contiguous(), (
        f"{x.shape=} {weight.shape=} {weight.stride()=}"
    )
    assert width % 32 == 0 or not round_inputs, f"{width=} is not made of groups of 32"
    require_cpu("linear", x, weight)
    if not batch_invariant:
        x = round_fp8(x) if round_inputs else x
        return F.linear(x.float(), weight.float()).to(out_dtype or x.dtype)
    if x.stride(1) != 1:
        x = x.contiguous()
    out = torch.empty(num_rows, columns, dtype=out_dtype or x.dtype)
    context().linear(
        x.data_ptr(),
        is_bfloat16(x),
        x.stride(0),
        width,
        weight.data_ptr(),
        is_bfloat16(weight),
        out.data_ptr(),
        is_bfloat16(out),
        num_rows,
        1,
        columns,
        width,
        round_inputs,
    )
    return out


def grouped_columns(
    x: Tensor,
    weight: Tensor,
    out_dtype: torch.dtype | None = None,
    *,
    round_inputs: bool = False,
    batch_invariant: bool = True,
) -> Tensor:
    """Independent products of G column groups: `out[:, g] = x[:, g] @ weight[g * N : (g + 1) * N].T`.

    Args:
        x: [M, G, K] float32 or bfloat16; the last dimension contiguous.
        weight: [G * N, K] float32 or bfloat16, contiguous; the rows of a group follow each other.

    Returns:
        [M, G, N] `out_dtype`, contiguous. The other arguments are those of `linear`.
    """
    num_rows, groups, width = x.shape
    columns = weight.shape[0] // groups
    assert weight.shape == (groups * columns, width), f"{x.shape=} {weight.shape=}"
    assert weight.is_contiguous(), f"{weight.stride()=}"
    assert width % 32 == 0 or not round_inputs, f"{width=} is not made of groups of 32"
    require_cpu("linear", x, weight)
    if not batch_invariant:
        x = round_fp8(x) if round_inputs else x
        per_group = weight.float().view(groups, columns, width)
        out = torch.bmm(x.float().transpose(0, 1), per_group.transpose(1, 2))
        return out.transpose(0, 1).to(out_dtype or x.dtype, memory_format=torch.contiguous_format)
    if x.stride(2) != 1 or x.stride(1) != width:
        x = x.contiguous()
    out = torch.empty(num_rows, groups, columns, dtype=out_dtype or x.dtype)
    context().linear(
        x.data_ptr(),
        is_bfloat16(x),
        x.stride(0),
        x.stride(1),
        weight.data_ptr(),
        is_bfloat16(weight),
        out.data_ptr(),
        is_bfloat16(out),
        num_rows,
        groups,
        columns,
        width,
        round_inputs,
    )
    return out


def grouped_linear(x: Tensor, weights: Tensor, group_offsets: Tensor) -> Tensor:
    """Products of rows sorted by group, each with its group's weight.

    Args:
        x: [M, K] float32 or bfloat16; rows `group_offsets[e] ... group_offsets[e + 1] - 1` belong to group e.
        weights: [E, N, K] float32 or bfloat16, contiguous.
        group_offsets: [E + 1] int32, ascending from 0 to M.

    Returns:
        [M, N] float32.

    Raises:
        ValueError: the offsets do not ascend from 0 to M.
    """
    num_groups, columns, width = weights.shape
    assert x.shape[1] == width and group_offsets.shape == (num_groups + 1,), f"{x.shape=} {weights.shape=}"
    assert weights.is_contiguous() and group_offsets.dtype == torch.int32, f"{weights.stride()=}"
    require_cpu("grouped_linear", x, weights, group_offsets)
    if x.stride(1) != 1:
        x = x.contiguous()
    offsets = group_offsets.contiguous()
    out = torch.empty(x.shape[0], columns)
    context().grouped_linear(
        x.data_ptr(),
        is_bfloat16(x),
        x.stride(0),
        weights.data_ptr(),
        is_bfloat16(weights),
        out.data_ptr(),
        offsets.data_ptr(),
        x.shape[0],
        num_groups,
        columns,
        width,
    )
    return out


def linear_reference(x: Tensor, weight: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """The meaning of `linear` without its roundings, computed in `dtype`: [M, K] x [N, K] -> [M, N]."""
    return x.to(dtype) @ weight.to(dtype).T


def grouped_linear_reference(
    x: Tensor, weights: Tensor, group_offsets: Tensor, dtype: torch.dtype = torch.float32
) -> Tensor:
    """The meaning of `grouped_linear`, computed in `dtype`."""
    bounds = group_offsets.tolist()
    parts = [linear_reference(x[a:b], w, dtype) for a, b, w in zip(bounds, bounds[1:], weights, strict=False)]
    return torch.cat(parts)
