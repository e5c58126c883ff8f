"""Torch meaning of `mix_coefficients`."""

from __future__ import annotations

import torch
from torch import Tensor

from tilelang_ops.common.numerics import sigmoid


def run(
    projection: Tensor,
    mean_square: Tensor,
    scale: Tensor,
    base: Tensor,
    num_streams: int,
    num_rounds: int,
    eps: float,
    norm_eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    normalised = projection * (1.0 / torch.sqrt(mean_square + norm_eps)).unsqueeze(1)
    z = normalised * scale + base
    gates = sigmoid(z[:, : 2 * num_streams])
    pre, post = gates.split(num_streams, dim=1)
    comb = z[:, 2 * num_streams :].unflatten(1, (num_streams, num_streams))
    return pre + eps, post * 2.0, sinkhorn(torch.softmax(comb, dim=2) + eps, num_rounds, eps)


def sinkhorn(matrices: Tensor, num_rounds: int, eps: float) -> Tensor:
    """Make [n, m, m] positive matrices nearly doubly stochastic, columns last.

    The matrices stand in a frame with one more row and column of `eps`, so that one sum gives `sum + eps`:
    two calls instead of three for each of the 2 * num_rounds - 1 normalisations.
    """
    num_rows, size, _ = matrices.shape
    frame = matrices.new_full((num_rows, size + 1, size + 1), eps)
    rows, columns, body = frame[:, :size], frame[:, :, :size], frame[:, :size, :size]
    body.copy_(matrices)
    row_sums, column_sums = matrices.new_empty(num_rows, size, 1), matrices.new_empty(num_rows, 1, size)
    body.div_(torch.sum(columns, 1, keepdim=True, out=column_sums))
    for _ in range(num_rounds - 1):
        body.div_(torch.sum(rows, 2, keepdim=True, out=row_sums))
        body.div_(torch.sum(columns, 1, keepdim=True, out=column_sums))
    return body.contiguous()
