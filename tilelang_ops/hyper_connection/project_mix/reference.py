"""Torch meaning of `project_mix`: what it fuses, one after the other."""

from __future__ import annotations

import torch
from torch import Tensor

from tilelang_ops.gemm.linear import reference as linear
from tilelang_ops.hyper_connection.mix_coefficients import reference as mix_coefficients


def run(
    streams: Tensor,
    weight: Tensor,
    mean_square: Tensor,
    scale: Tensor,
    base: Tensor,
    num_parts: int,
    num_rounds: int,
    eps: float,
    norm_eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    projection = linear.run(streams.flatten(1), weight, torch.float32, num_parts)
    m = streams.shape[1]
    return mix_coefficients.run(projection, mean_square, scale, base, m, num_rounds, eps, norm_eps)
