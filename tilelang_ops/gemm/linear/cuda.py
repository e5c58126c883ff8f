"""linear on CUDA: both operands from shared memory; weights are the first unless they have few rows."""

import torch
from torch import Tensor

from tilelang_ops.common.kernels import CUDA_TARGETS, cuda_kernel
from tilelang_ops.common.matrix import matrix_program
from tilelang_ops.common.matrix_tiles import MANY_BLOCKS, PROCESSORS, split_count, tile, tile_rows
from tilelang_ops.common.row_product import MAX_COLUMNS, TILE_ROWS, row_program, segment_count
from tilelang_ops.common.segment_sums import sum_program

MANY_ROWS = TILE_ROWS * PROCESSORS  # from here on a block sums all segments of a narrow weight


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


def _is_narrow(rows: int, width: int) -> bool:
    """Whether a weight has few rows and many channels."""
    return rows <= MAX_COLUMNS and segment_count(width) > 1


def _num_splits(rows: int, width: int) -> int:
    return segment_count(width) if _is_narrow(rows, width) else split_count(rows, width)


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
        if not _is_narrow(columns * parts, width)
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
        {"columns": columns * parts, "width": width, "in_turn": in_turn}
        for columns, width, parts, _ in shapes(model)
        if _is_narrow(columns * parts, width)
        for in_turn in (False, True)
    ],
    uses_tensor_cores=True,
)
def narrow(columns: int, width: int, in_turn: bool, arch: str):
    return row_program(name="narrow", columns=columns, width=width, in_turn=in_turn, arch=arch)


@cuda_kernel(
    builds=lambda model: [
        {"columns": columns, "num_parts": parts, "num_splits": num_sums, "result": result}
        for columns, width, parts, result in shapes(model)
        if _num_splits(columns * parts, width) > 1
        for num_sums in (_num_splits(columns * parts, width), 1)
        if num_sums > 1 or _is_narrow(columns * parts, width)
    ],
    targets=CUDA_TARGETS,
)
def sum_parts(columns: int, num_parts: int, num_splits: int, result: str):
    return sum_program(
        name="sum_parts", columns=columns, num_parts=num_parts, num_splits=num_splits, result=result
    )


def run_partial(x: Tensor, weight: Tensor) -> Tensor:
    """Sums of segments of the channels: float32 [num_sums, m, rows of the weight].

    There are as many sums as segments, or one, with the same bits, where the rows alone give many blocks.
    """
    (num_rows, width), rows = x.shape, weight.shape[0]
    num_splits, column_tiles = _num_splits(rows, width), -(-rows // 128)
    is_narrow = _is_narrow(rows, width)
    in_turn = num_rows >= MANY_ROWS if is_narrow else column_tiles * -(-num_rows // 128) >= MANY_BLOCKS
    partial = x.new_empty(1 if in_turn else num_splits, num_rows, rows, dtype=torch.float32)
    if is_narrow:
        narrow(columns=rows, width=width, in_turn=in_turn)(x.contiguous(), weight, partial)
        return partial
    block_n = tile_rows(num_rows, column_tiles * len(partial), _choices(num_splits))
    sizes = {"columns": rows, "width": width, "result": "float32", "num_splits": num_splits}
    program = kernel(**sizes, in_turn=in_turn, block_n=block_n)
    program(x.contiguous(), weight, partial.flatten(0, 1))
    return partial


def _choices(num_splits: int) -> tuple[int, ...]:
    """Rows of a tile that there are programs for."""
    return (64, 128, 256) if num_splits == 1 else (64, 128)


def run(x: Tensor, weight: Tensor, dtype: torch.dtype, num_parts: int) -> Tensor:
    num_rows, width = x.shape
    rows = weight.shape[0]
    result = str(dtype).removeprefix("torch.")
    num_splits, column_tiles = _num_splits(rows, width), -(-rows // 128)
    in_turn = num_splits == 1 or column_tiles * -(-num_rows // 128) >= MANY_BLOCKS
    in_turn = in_turn and num_parts == 1 and not _is_narrow(rows, width)
    out = x.new_empty(num_rows, rows // num_parts, dtype=dtype)
    if in_turn:
        block_n = tile_rows(num_rows, column_tiles, _choices(num_splits))
        sizes = {"columns": rows, "width": width, "result": result, "num_splits": num_splits}
        kernel(**sizes, in_turn=True, block_n=block_n)(x.contiguous(), weight, out)
        return out
    partial = run_partial(x, weight)
    sizes = {"columns": rows // num_parts, "num_parts": num_parts, "num_splits": len(partial)}
    sum_parts(**sizes, result=result)(partial, out)
    return out
