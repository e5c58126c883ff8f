"""grouped_linear_mxfp4 on CUDA: a grid of tiles for any distribution of rows, empty experts included."""

import torch
from torch import Tensor

from tilelang_ops.common.kernels import cuda_kernel
from tilelang_ops.common.matrix import matrix_program, tile_rows


@cuda_kernel(
    builds=lambda model: [
        {
            "columns": model.hidden_size,
            "width": model.moe_intermediate_size,
            "block_n": block_n,
        }
        for block_n in (64, 128)
    ],
    uses_tensor_cores=True,
)
def kernel(columns: int, width: int, block_n: int, arch: str):
    return matrix_program(
        name="grouped_linear_mxfp4",
        fmt="mxfp4",
        columns=columns,
        width=width,
        result="bfloat16",
        block_m=128,
        block_n=block_n,
        stages=4,
        is_grouped=True,
        arch=arch,
    )


def run(x: Tensor, weights: Tensor, offsets: Tensor, columns: int) -> Tensor:
    num_rows, width = x.shape
    out = x.new_empty(num_rows, columns)
    block_n = tile_rows(num_rows // weights.shape[0])
    program = kernel(columns=columns, width=width, block_n=block_n)
    program(x.contiguous(), weights.view(torch.uint32).flatten(0, 1), offsets, out)
    return out
