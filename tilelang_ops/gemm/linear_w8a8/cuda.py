"""linear_w8a8 on CUDA: products in FP8 on SM90; see `common/fp8_products.py`."""

import torch
from torch import Tensor

from tilelang_ops.common.fp8_products import dense_program, sizes_of, tile_of, tiles_for
from tilelang_ops.common.kernels import cuda_kernel
from tilelang_ops.common.matrix_tiles import split_count
from tilelang_ops.common.row_codes import UNIT
from tilelang_ops.gemm.linear_fp8.cuda import shapes, sum_parts


def _splits(columns, width, num_groups):
    """Segments of whole units."""
    splits = split_count(columns, width) if num_groups == 1 else 1
    return splits if width % (splits * UNIT) == 0 else 1


def _builds(model):
    found = []
    for columns, width, groups in shapes(model):
        splits = _splits(columns, width, groups)
        sizes = {"columns": columns, "width": width, "num_groups": groups, "num_splits": splits}
        choices = tiles_for(splits, -(-width // UNIT) // splits)
        found += [{**sizes, "in_turn": in_turn, "tile": tile} for in_turn, tile in choices]
    return found


@cuda_kernel(builds=_builds, targets=("sm_90a",), uses_tensor_cores=True)
def kernel(columns: int, width: int, num_groups: int, num_splits: int, in_turn: bool, tile: str):
    return dense_program(
        name="linear_w8a8",
        columns=columns,
        width=width,
        result="bfloat16" if in_turn else "float32",
        num_groups=num_groups,
        num_splits=num_splits,
        in_turn=in_turn,
        **sizes_of(tile, -(-width // UNIT) // num_splits),
    )


def run(codes: Tensor, scales: Tensor, weight: Tensor, weight_scales: Tensor) -> Tensor:
    (num_groups, columns, width), num_rows = weight.shape, codes.shape[0]
    num_splits = _splits(columns, width, num_groups)
    in_turn, tile = tile_of(num_rows, columns, -(-width // UNIT) // num_splits, num_groups, num_splits)
    out = torch.empty(num_rows, num_groups * columns, dtype=torch.bfloat16, device=codes.device)
    operands = (
        codes.view(torch.float8_e4m3fn),
        scales,
        weight.flatten(0, 1).view(torch.float8_e4m3fn),
        weight_scales.flatten(0, 1),
    )
    program = kernel(
        columns=columns, width=width, num_groups=num_groups, num_splits=num_splits, in_turn=in_turn, tile=tile
    )
    if in_turn:
        program(*operands, out)
        return out
    partial = out.new_empty(num_splits, num_rows, columns, dtype=torch.float32)
    program(*operands, partial.flatten(0, 1))
    sum_parts(columns=columns, num_splits=num_splits)(partial, out)
    return out
