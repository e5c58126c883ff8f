"""grouped_linear_mxfp4 on Ascend 950: linear_fp8 with a tile's expert looked up, see `common/cube.py`."""

import torch
from torch import Tensor

from tilelang_ops.common.cube import cube_program
from tilelang_ops.common.kernels import ascend_kernel


@ascend_kernel(
    builds=lambda model: [{"columns": model.hidden_size, "width": model.moe_intermediate_size}],
    uses_tensor_cores=True,
)
def kernel(columns: int, width: int):
    return cube_program(
        name="grouped_linear_mxfp4",
        fmt="mxfp4",
        columns=columns,
        width=width,
        result="bfloat16",
        is_grouped=True,
    )


def run(x: Tensor, weights: Tensor, offsets: Tensor, columns: int) -> Tensor:
    out = x.new_empty(x.shape[0], columns)
    program = kernel(columns=columns, width=x.shape[1])
    program(x.contiguous(), weights.view(torch.uint32).flatten(0, 1), offsets, out)
    return out
