"""grouped_linear_mxfp4 on CUDA: a grid of tiles for any distribution of rows, empty experts included."""

import torch
from torch import Tensor

from tilelang_ops.common.kernels import cuda_kernel
from tilelang_ops.common.matrix import matrix_program
from tilelang_ops.common.matrix_tiles import FEW_EXPERT_ROWS, PLAIN_TILES, PROCESSORS, expert_rows, tile

WIDE_ROWS = 320  # weight rows of a tile that leave one round of blocks


@cuda_kernel(
    builds=lambda model: [
        {"columns": model.hidden_size, "width": model.moe_intermediate_size, "block_n": n, "is_wide": is_wide}
        for n in (*FEW_EXPERT_ROWS.values(), *PLAIN_TILES)
        for is_wide in (True, False)
        if not is_wide or (n < 128 and model.hidden_size % WIDE_ROWS == 0)
    ],
    uses_tensor_cores=True,
)
def kernel(columns: int, width: int, block_n: int, is_wide: bool, arch: str):
    if arch == "sm_100a":
        block_n = min(block_n, 128)  # registers that its sums pass through
    sizes = tile("mxfp4", block_n, width, arch)
    if is_wide and arch == "sm_90a":  # an instruction of SM100 has 128 rows
        sizes = {"block_m": WIDE_ROWS, "stages": 2, "depth": 4, "is_overlapped": True, "granule": 32}
    return matrix_program(
        name="grouped_linear_mxfp4",
        fmt="mxfp4",
        columns=columns,
        width=width,
        result="bfloat16",
        block_n=block_n,
        is_grouped=True,
        arch=arch,
        **sizes,
    )


def run(x: Tensor, weights: Tensor, offsets: Tensor, columns: int) -> Tensor:
    num_rows, width = x.shape
    num_experts = weights.shape[0]
    out = x.new_empty(num_rows, columns)
    block_n = expert_rows(num_rows, num_experts, columns, PLAIN_TILES)
    is_one_round = columns % WIDE_ROWS == 0 and num_experts * columns <= WIDE_ROWS * PROCESSORS
    program = kernel(columns=columns, width=width, block_n=block_n, is_wide=block_n < 128 and is_one_round)
    program(x.contiguous(), weights.view(torch.uint32).flatten(0, 1), offsets, out)
    return out
