"""linear_fp8 on Ascend 950: vector cores unpack the weights, cube cores multiply, see `common/cube.py`."""

import torch
from torch import Tensor

from tilelang_ops.common.cube import cube_program
from tilelang_ops.common.kernels import ascend_kernel
from tilelang_ops.gemm.linear_fp8.cuda import shapes


@ascend_kernel(
    builds=lambda model: [
        {"columns": columns, "width": width, "num_groups": groups} for columns, width, groups in shapes(model)
    ],
    uses_tensor_cores=True,
)
def kernel(columns: int, width: int, num_groups: int):
    return cube_program(
        name="linear_fp8",
        fmt="fp8",
        columns=columns,
        width=width,
        result="bfloat16",
        num_groups=num_groups,
    )


def run(x: Tensor, weight: Tensor, columns: int, num_groups: int) -> Tensor:
    out = x.new_empty(x.shape[0], num_groups * columns)
    program = kernel(columns=columns, width=x.shape[1] // num_groups, num_groups=num_groups)
    program(x.contiguous(), weight.view(torch.uint32).flatten(0, 1), out)
    return out
