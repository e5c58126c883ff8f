"""Products of activations with float32 weights, whose rows do not depend on the batch they stand in.

The library's own product chooses its summation order by the shape of the batch. Here the order of every
output element is fixed, so a row has the same bits alone, in any batch, at any place and with any number
of threads.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.ops.activation import round_activations

TILE_ROWS = 8  # rows of one product of the reference; a row's result depends on it, not on the batch


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
        weight: [N, K] float32, contiguous.
        out_dtype: float32 or bfloat16; `x.dtype` when None.
        round_inputs: round every row of `x` to E4M3 in groups of 32 channels first.
        batch_invariant: False lets the library choose the order, to measure what the fixed order costs.

    Returns:
        [M, N] `out_dtype`, contiguous.
    """
    assert x.dim() == 2 and x.shape[1] == weight.shape[1], f"{x.shape=} {weight.shape=}"
    return grouped_columns(
        x.unsqueeze(1), weight, out_dtype, round_inputs=round_inputs, batch_invariant=batch_invariant
    ).squeeze(1)


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
        weight: [G * N, K] float32, contiguous; the rows of a group follow each other.

    Returns:
        [M, G, N] `out_dtype`, contiguous. The other arguments are those of `linear`.
    """
    assert x.dim() == 3 and x.shape[2] == weight.shape[1], f"{x.shape=} {weight.shape=}"
    assert weight.shape[0] % x.shape[1] == 0, f"{weight.shape=} does not split into {x.shape[1]} groups"
    out_dtype = out_dtype or x.dtype
    if round_inputs:
        x = round_activations(x)
    per_group = weight.view(x.shape[1], -1, weight.shape[1])
    if batch_invariant:
        return linear_reference(x, per_group).to(out_dtype)
    return torch.einsum("mgk,gnk->mgn", x.float(), per_group).to(out_dtype)


def grouped_linear(x: Tensor, weights: Tensor, group_offsets: Tensor) -> Tensor:
    """Products of rows sorted by group, each with its group's weight.

    Args:
        x: [M, K] float32 or bfloat16; rows `group_offsets[e] ... group_offsets[e + 1] - 1` belong to group e.
        weights: [E, N, K] float32, contiguous.
        group_offsets: [E + 1] int32, ascending from 0 to M.

    Returns:
        [M, N] float32.
    """
    assert group_offsets.shape[0] == weights.shape[0] + 1, f"{group_offsets.shape=} {weights.shape=}"
    out = x.new_empty(x.shape[0], weights.shape[1], dtype=torch.float32)
    bounds = group_offsets.tolist()
    for group, (start, stop) in enumerate(zip(bounds, bounds[1:], strict=False)):
        if stop > start:
            out[start:stop] = linear_reference(
                x[start:stop].unsqueeze(1), weights[group : group + 1]
            ).squeeze(1)
    return out


def linear_reference(x: Tensor, weight: Tensor) -> Tensor:
    """[M, G, K] x [G, N, K] -> float32 [M, G, N] in tiles of a fixed number of rows."""
    num_rows, groups, width = x.shape
    tiles = -(-num_rows // TILE_ROWS)
    padded = x.new_zeros(tiles * TILE_ROWS, groups, width, dtype=torch.float32)
    padded[:num_rows] = x
    out = padded.new_empty(tiles * TILE_ROWS, groups, weight.shape[1])
    for group in range(groups):
        tile = padded[:, group].reshape(tiles, TILE_ROWS, width)
        product = torch.bmm(tile, weight[group].T.expand(tiles, -1, -1))
        out[:, group] = product.view(tiles * TILE_ROWS, -1)
    return out[:num_rows]
