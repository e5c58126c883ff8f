"""project_mix on Ascend: the product, then the mixes."""

import torch
from torch import Tensor

from tilelang_ops.gemm.linear import ascend as linear
from tilelang_ops.hyper_connection.mix_coefficients import ascend as mix_coefficients


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
