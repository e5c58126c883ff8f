"""project_mix on CUDA: the product's segments, which the kernel of the mixes adds while it reads them."""

from torch import Tensor

from tilelang_ops.gemm.linear.cuda import run_partial
from tilelang_ops.hyper_connection.mix_coefficients.cuda import launch


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
    partial = run_partial(streams.flatten(1), weight) if streams.shape[0] > 0 else None
    return launch(
        partial, mean_square, scale, base, streams.shape[1], num_rounds, eps, norm_eps, num_parts=num_parts
    )
