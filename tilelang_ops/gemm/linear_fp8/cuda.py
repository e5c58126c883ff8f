"""linear_fp8 on CUDA: weights decoded in registers; on SM100 into shared memory, sums in tensor memory."""

import torch
from torch import Tensor

from tilelang_ops.common.kernels import CUDA_TARGETS, cuda_kernel
from tilelang_ops.common.matrix import matrix_program
from tilelang_ops.common.matrix_tiles import (
    FEW_ROWS,
    TILE_COSTS,
    split_count,
    tile,
    tile_of_splits,
    tile_rows,
)
from tilelang_ops.common.segment_sums import sum_program

SEGMENT_ROWS = (64, 96, 128)  # activation rows of a tile where there are segments: a block holds two sums


def shapes(model):
    """(columns, width, groups) of the model's FP8 weights."""
    hidden, heads = model.hidden_size, model.num_attention_heads * model.head_dim
    inner = model.moe_intermediate_size
    return [
        (model.q_lora_rank, hidden, 1),
        (model.q_lora_rank + model.head_dim, hidden, 1),
        (heads, model.q_lora_rank, 1),
        (model.index_n_heads * model.index_head_dim, model.q_lora_rank, 1),
        (model.head_dim, hidden, 1),
        (model.o_lora_rank, heads // model.o_groups, model.o_groups),
        (hidden, model.o_groups * model.o_lora_rank, 1),
        (2 * inner, hidden, 1),
        (hidden, inner, 1),
        ((model.hc_mult + 1) * hidden, model.engram_columns * model.engram_head_dim, 1),
        (hidden, model.dspark_num_targets * hidden, 1),
    ]


def _splits(columns, width, num_groups):
    return split_count(columns, width) if num_groups == 1 else 1


def _builds(model):
    found = []
    for columns, width, groups in shapes(model):
        num_splits = _splits(columns, width, groups)
        sizes = {"columns": columns, "width": width, "num_groups": groups, "num_splits": num_splits}
        if num_splits == 1:
            found += [{**sizes, "in_turn": True, "block_n": rows} for rows in (FEW_ROWS, *TILE_COSTS)]
        else:
            found += [{**sizes, "in_turn": True, "block_n": rows} for rows in SEGMENT_ROWS]
            found += [{**sizes, "in_turn": False, "block_n": rows} for rows in (FEW_ROWS, *SEGMENT_ROWS)]
    return found


@cuda_kernel(builds=_builds, uses_tensor_cores=True)
def kernel(
    columns: int,
    width: int,
    num_groups: int,
    num_splits: int,
    in_turn: bool,
    block_n: int,
    arch: str,
):
    sizes = tile("fp8", block_n, width // num_splits, arch)
    if num_groups > 1 and columns % 128:
        sizes["block_m"] = 64  # a tile lies in one group
    return matrix_program(
        name="linear_fp8",
        fmt="fp8",
        columns=columns,
        width=width,
        result="bfloat16" if in_turn else "float32",
        block_n=block_n,
        num_groups=num_groups,
        num_splits=num_splits,
        in_turn=in_turn,
        arch=arch,
        **sizes,
    )


@cuda_kernel(
    builds=lambda model: [
        {"columns": columns, "num_splits": _splits(columns, width, groups)}
        for columns, width, groups in shapes(model)
        if _splits(columns, width, groups) > 1
    ],
    targets=CUDA_TARGETS,
)
def sum_parts(columns: int, num_splits: int):
    return sum_program(
        name="sum_parts", columns=columns, num_parts=1, num_splits=num_splits, result="bfloat16"
    )


def run(x: Tensor, weight: Tensor, columns: int, num_groups: int) -> Tensor:
    num_rows, width = x.shape[0], x.shape[1] // num_groups
    num_splits, column_tiles = _splits(columns, width, num_groups), num_groups * -(-columns // 128)
    if num_rows <= FEW_ROWS:
        in_turn, block_n = num_splits == 1, FEW_ROWS
    elif num_splits == 1:
        in_turn, block_n = True, tile_rows(num_rows, column_tiles, tuple(TILE_COSTS))
    else:
        in_turn, block_n = tile_of_splits(num_rows, columns, width, num_splits, SEGMENT_ROWS)
    out = x.new_empty(num_rows, num_groups * columns)
    sizes = {"columns": columns, "width": width, "num_groups": num_groups, "num_splits": num_splits}
    program = kernel(**sizes, in_turn=in_turn, block_n=block_n)
    packed = weight.view(torch.uint32).flatten(0, 1)
    if in_turn:
        program(x.contiguous(), packed, out)
        return out
    partial = x.new_empty(num_splits, num_rows, columns, dtype=torch.float32)
    program(x.contiguous(), packed, partial.flatten(0, 1))
    sum_parts(columns=columns, num_splits=num_splits)(partial, out)
    return out
