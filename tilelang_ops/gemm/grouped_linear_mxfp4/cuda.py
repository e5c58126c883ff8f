"""grouped_linear_mxfp4 on CUDA: a grid of tiles for any distribution of rows, empty experts included."""

import torch
from torch import Tensor

from tilelang_ops.common.kernels import cuda_kernel
from tilelang_ops.common.matrix import PROCESSORS, matrix_program, pipeline


@cuda_kernel(
    builds=lambda model: [
        {
            "columns": model.hidden_size,
            "width": model.moe_intermediate_size,
            "block_m": block_m,
            "block_n": block_n,
        }
        for block_m, block_n in ((320, 64), (128, 64), (128, 128))
        if model.hidden_size % block_m == 0
    ],
    uses_tensor_cores=True,
)
def kernel(columns: int, width: int, block_m: int, block_n: int, arch: str):
    is_wide = block_m > 128 and arch == "sm_90a"  # an instruction of SM100 has 128 rows
    return matrix_program(
        name="grouped_linear_mxfp4",
        fmt="mxfp4",
        columns=columns,
        width=width,
        result="bfloat16",
        block_m=block_m if is_wide else 128,
        block_n=block_n,
        is_grouped=True,
        arch=arch,
        **({"stages": 2, "depth": 4} if is_wide else pipeline("mxfp4", block_n, width, arch)),
    )


def run(x: Tensor, weights: Tensor, offsets: Tensor, columns: int) -> Tensor:
    num_rows, width = x.shape
    num_experts = weights.shape[0]
    out = x.new_empty(num_rows, columns)
    block_n = 64 if num_rows <= 64 * num_experts else 128
    is_one_round = block_n == 64 and columns % 320 == 0 and num_experts * columns <= 320 * PROCESSORS
    program = kernel(columns=columns, width=width, block_m=320 if is_one_round else 128, block_n=block_n)
    program(x.contiguous(), weights.view(torch.uint32).flatten(0, 1), offsets, out)
    return out
