"""grouped_linear_w4a8 on CUDA: a grid of tiles for any distribution of rows."""

import torch
from torch import Tensor

from tilelang_ops.common import expert_wide
from tilelang_ops.common.expert_products import (
    PLAIN_TILES,
    expert_program,
    operands,
    tile_rows,
)
from tilelang_ops.common.kernels import cuda_kernel
from tilelang_ops.common.row_codes import RowCodes


@cuda_kernel(
    builds=lambda model: [
        {"columns": model.hidden_size, "width": model.moe_intermediate_size, "block_n": block_n}
        for block_n in PLAIN_TILES
    ],
    targets=("sm_90a",),
    uses_tensor_cores=True,
)
def kernel(columns: int, width: int, block_n: int):
    return expert_program(
        name="grouped_linear_w4a8", columns=columns, width=width, block_n=block_n, tile=PLAIN_TILES[block_n]
    )


@cuda_kernel(
    builds=lambda model: [{"columns": model.hidden_size, "width": model.moe_intermediate_size}],
    targets=("sm_90a",),
    uses_tensor_cores=True,
)
def many_rows(columns: int, width: int):
    return expert_wide.wide_program(name="grouped_linear_w4a8", columns=columns, width=width)


def run(
    rows: RowCodes,
    weights: Tensor,
    references: Tensor,
    offsets: Tensor,
    columns: int,
    codes: Tensor | None = None,
) -> Tensor:
    num_rows, width = rows.codes.shape
    out = torch.empty(num_rows, columns, dtype=torch.bfloat16, device=offsets.device)
    if expert_wide.serves(rows, weights.shape[0], codes):
        program = many_rows(columns=columns, width=width)
        program(*expert_wide.operands(rows, codes, references), offsets, out)
        return out
    block_n = tile_rows(num_rows, weights.shape[0], columns, PLAIN_TILES)
    program = kernel(columns=columns, width=width, block_n=block_n)
    program(*operands(rows, weights, references), offsets, out)
    return out
