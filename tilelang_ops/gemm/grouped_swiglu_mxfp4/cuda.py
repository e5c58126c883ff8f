"""grouped_swiglu_mxfp4 on CUDA: grouped_linear_mxfp4 whose tiles are activated before they are stored."""

import torch
from torch import Tensor

from tilelang_ops.common.kernels import cuda_kernel
from tilelang_ops.common.matrix import matrix_program
from tilelang_ops.common.matrix_tiles import FEW_EXPERT_ROWS, GATED_TILES, expert_rows, tile


@cuda_kernel(
    builds=lambda model: [
        {
            "inner": model.moe_intermediate_size,
            "width": model.hidden_size,
            "block_n": block_n,
            "round_output": True,
        }
        for block_n in (*FEW_EXPERT_ROWS.values(), *GATED_TILES)
    ],
    uses_tensor_cores=True,
)
def kernel(inner: int, width: int, block_n: int, round_output: bool, arch: str):
    return matrix_program(
        name="grouped_swiglu_mxfp4",
        fmt="mxfp4",
        columns=2 * inner,
        width=width,
        result="bfloat16",
        block_n=block_n,
        is_grouped=True,
        is_gated=True,
        round_output=round_output,
        arch=arch,
        **tile("mxfp4", block_n, width, arch),
    )


def run(
    x: Tensor,
    weights: Tensor,
    offsets: Tensor,
    factors: Tensor,
    limit: float,
    inner: int,
    round_output: bool,
) -> Tensor:
    num_rows, width = x.shape
    out = x.new_empty(num_rows, inner)
    program = kernel(
        inner=inner,
        width=width,
        block_n=expert_rows(num_rows, weights.shape[0], 2 * inner, GATED_TILES),
        round_output=round_output,
    )
    program(x.contiguous(), weights.view(torch.uint32).flatten(0, 1), offsets, factors, out, limit)
    return out
