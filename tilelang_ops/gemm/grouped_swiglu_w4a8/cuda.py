"""grouped_swiglu_w4a8 on CUDA: grouped_linear_w4a8 whose tiles are activated and encoded."""

import torch
from torch import Tensor

from tilelang_ops.common import expert_wide
from tilelang_ops.common.expert_products import (
    GATED_TILES,
    expert_program,
    operands,
    tile_rows,
)
from tilelang_ops.common.kernels import cuda_kernel
from tilelang_ops.common.row_codes import RowCodes


@cuda_kernel(
    builds=lambda model: [
        {"inner": model.moe_intermediate_size, "width": model.hidden_size, "block_n": block_n}
        for block_n in GATED_TILES
    ],
    targets=("sm_90a",),
    uses_tensor_cores=True,
)
def kernel(inner: int, width: int, block_n: int):
    return expert_program(
        name="grouped_swiglu_w4a8",
        columns=2 * inner,
        width=width,
        block_n=block_n,
        tile=GATED_TILES[block_n],
        is_gated=True,
    )


@cuda_kernel(
    builds=lambda model: [{"inner": model.moe_intermediate_size, "width": model.hidden_size}],
    targets=("sm_90a",),
    uses_tensor_cores=True,
)
def many_rows(inner: int, width: int):
    return expert_wide.wide_program(name="grouped_swiglu_w4a8", columns=2 * inner, width=width, is_gated=True)


def run(
    rows: RowCodes,
    weights: Tensor,
    references: Tensor,
    offsets: Tensor,
    factors: Tensor,
    limit: float,
    inner: int,
    codes: Tensor | None = None,
) -> RowCodes:
    num_rows, width = rows.codes.shape
    out = RowCodes.empty(num_rows, inner, offsets.device)
    outputs = out.codes.view(torch.float8_e4m3fn), out.scales
    if expert_wide.serves(rows, weights.shape[0], codes):
        program = many_rows(inner=inner, width=width)
        program(*expert_wide.operands(rows, codes, references), offsets, factors, *outputs, limit)
        return out
    block_n = tile_rows(num_rows, weights.shape[0], 2 * inner, GATED_TILES)
    program = kernel(inner=inner, width=width, block_n=block_n)
    program(*operands(rows, weights, references), offsets, factors, *outputs, limit)
    return out
