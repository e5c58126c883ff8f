"""The product of the residual streams with a site's matrix, and the three mixes that it gives."""

from __future__ import annotations

import torch
from torch import Tensor

from tilelang_ops.common.dispatch import backend


def project_mix(
    streams: Tensor,
    weight: Tensor,
    mean_square: Tensor,
    scale: Tensor,
    base: Tensor,
    *,
    num_parts: int,
    num_rounds: int,
    eps: float,
    norm_eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """A fusion: `gemm.linear` to float32, then `mix_coefficients`; its bits are those of the two.

    Args:
        streams: [n, m, width] bfloat16, contiguous.
        weight: [num_parts * (2 + m) * m, m * width] bfloat16 of `packing.split_float32`, or one part.
        mean_square, scale, base: of the streams' values, and the site's, as in `mix_coefficients`.
        num_parts: terms that the matrix is the sum of.
        num_rounds, eps, norm_eps: as in `mix_coefficients`.

    Returns:
        pre [n, m], post [n, m], comb [n, m, m], float32, as `mix_coefficients`.
    """
    num_rows, m, width = streams.shape
    entries = (2 + m) * m
    assert streams.dtype == weight.dtype == torch.bfloat16 and streams.is_contiguous(), f"{streams.dtype=}"
    assert weight.shape == (num_parts * entries, m * width), f"{streams.shape=} {weight.shape=} {num_parts=}"
    assert scale.shape == base.shape == (entries,) and mean_square.shape == (num_rows,), f"{scale.shape=}"
    assert num_rounds >= 1, f"{num_rounds=}"
    return backend(__package__, streams.device).run(
        streams, weight, mean_square, scale, base, num_parts, num_rounds, eps, norm_eps
    )
