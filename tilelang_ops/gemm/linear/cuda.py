"""linear on CUDA: both operands from shared memory, the weights as rows of the instruction."""

import torch
from torch import Tensor

from tilelang_ops.common.kernels import CUDA_TARGETS, cuda_kernel
from tilelang_ops.common.matrix import matrix_program, sum_program
from tilelang_ops.common.matrix_tiles import MANY_BLOCKS, split_count, tile, tile_rows


def shapes(model):
    """(columns, width, parts, result) of the model's bfloat16 and float32 weights."""
    hidden, mixes = model.hidden_size, model.hc_mult
    return [
        (model.vocab_size, hidden, 1, "float32"),
        (model.n_routed_experts, hidden, 1, "float32"),
        (model.dspark_n_routed_experts, hidden, 1, "float32"),
        (model.index_n_heads, hidden, 1, "bfloat16"),
        (model.index_head_dim, model.head_dim, 1, "bfloat16"),
        (2 * model.head_dim, hidden, 1, "float32"),
        (model.head_dim, hidden, 1, "bfloat16"),
        (mixes * (mixes + 2), mixes * hidden, 3, "float32"),
    ]


@cuda_kernel(
    builds=lambda model: [
        {
            "columns": columns * parts,
            "width": width,
            "result": result if in_turn else "float32",
            "num_splits": split_count(columns * parts, width),
            "in_turn": in_turn,
            "block_n": block_n,
        }
        for columns, width, parts, result in shapes(model)
        for in_turn in (True, False)
        for block_n in (64, 128, 256)
        if in_turn or split_count(columns * parts, width) > 1
        if block_n < 256 or split_count(columns * parts, width) == 1
    ],
    uses_tensor_cores=True,
)
def kernel(columns: int, width: int, result: str, num_splits: int, in_turn: bool, block_n: int, arch: str):
    return matrix_program(
        name="linear",
        fmt="bfloat16",
        columns=columns,
        width=width,
        result=result,
        block_n=block_n,
        num_splits=num_splits,
        in_turn=in_turn,
        arch=arch,
        **tile("bfloat16", block_n, width // num_splits, arch),
    )


@cuda_kernel(
    builds=lambda model: [
        {
            "columns": columns,
            "num_parts": parts,
            "num_splits": split_count(columns * parts, width),
            "result": result,
        }
        for columns, width, parts, result in shapes(model)
        if split_count(columns * parts, width) > 1
    ],
    targets=CUDA_TARGETS,
)
def sum_parts(columns: int, num_parts: int, num_splits: int, result: str):
    return sum_program(
        name="sum_parts", columns=columns, num_parts=num_parts, num_splits=num_splits, result=result
    )


def run_partial(x: Tensor, weight: Tensor) -> Tensor:
    """Sums of segments of the channels: float32 [num_sums * m, rows of the weight].

    There are as many sums as segments, or one, with the same bits, where the rows alone give many blocks.
    """
    (num_rows, width), rows = x.shape, weight.shape[0]
    num_splits, column_tiles = split_count(rows, width), -(-rows // 128)
    in_turn = column_tiles * -(-num_rows // 128) >= MANY_BLOCKS
    num_sums = 1 if in_turn else num_splits
    block_n = tile_rows(num_rows, column_tiles * num_sums, _choices(num_splits))
    partial = x.new_empty(num_sums * num_rows, rows, dtype=torch.float32)
    sizes = {"columns": rows, "width": width, "result": "float32", "num_splits": num_splits}
    kernel(**sizes, in_turn=in_turn, block_n=block_n)(x.contiguous(), weight, partial)
    return partial


def _choices(num_splits: int) -> tuple[int, ...]:
    """Rows of a tile that there are programs for."""
    return (64, 128, 256) if num_splits == 1 else (64, 128)


def run(x: Tensor, weight: Tensor, dtype: torch.dtype, num_parts: int) -> Tensor:
    num_rows, width = x.shape
    rows = weight.shape[0]
    result = str(dtype).removeprefix("torch.")
    num_splits, column_tiles = split_count(rows, width), -(-rows // 128)
    in_turn = num_splits == 1 or column_tiles * -(-num_rows // 128) >= MANY_BLOCKS
    in_turn = in_turn and num_parts == 1
    out = x.new_empty(num_rows, rows // num_parts, dtype=dtype)
    if in_turn:
        block_n = tile_rows(num_rows, column_tiles, _choices(num_splits))
        sizes = {"columns": rows, "width": width, "result": result, "num_splits": num_splits}
        kernel(**sizes, in_turn=True, block_n=block_n)(x.contiguous(), weight, out)
        return out
    partial = run_partial(x, weight)
    sizes = {"columns": rows // num_parts, "num_parts": num_parts, "num_splits": len(partial) // num_rows}
    sum_parts(**sizes, result=result)(partial, out)
    return out
