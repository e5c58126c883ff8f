"""linear on Ascend 950: both operands from memory to the cube cores, see `common/cube.py`."""

import torch
from torch import Tensor

from tilelang_ops.common.cube import cube_program
from tilelang_ops.common.kernels import ASCEND_TARGET, ascend_kernel, cuda_kernel
from tilelang_ops.common.segment_sums import sum_program
from tilelang_ops.gemm.linear.cuda import shapes


@ascend_kernel(
    builds=lambda model: [
        {"columns": columns * parts, "width": width, "result": result}
        for columns, width, parts, result in shapes(model)
    ],
    uses_tensor_cores=True,
)
def kernel(columns: int, width: int, result: str):
    return cube_program(name="linear", fmt="bfloat16", columns=columns, width=width, result=result)


@cuda_kernel(
    builds=lambda model: [
        {"columns": columns, "num_parts": parts, "result": result}
        for columns, _, parts, result in shapes(model)
        if parts > 1
    ],
    targets=(ASCEND_TARGET,),
)
def sum_terms(columns: int, num_parts: int, result: str):
    """The sum of the products with a weight's terms; CUDA's program, on the vector cores."""
    return sum_program(name="sum_terms", columns=columns, num_parts=num_parts, num_splits=1, result=result)


def run(x: Tensor, weight: Tensor, dtype: torch.dtype, num_parts: int) -> Tensor:
    rows, width = weight.shape
    result = str(dtype).removeprefix("torch.")
    out = x.new_empty(x.shape[0], rows // num_parts, dtype=dtype)
    if num_parts == 1:
        kernel(columns=rows, width=width, result=result)(x.contiguous(), weight, out)
        return out
    products = x.new_empty(x.shape[0], rows, dtype=torch.float32)
    kernel(columns=rows, width=width, result="float32")(x.contiguous(), weight, products)
    sum_terms(columns=rows // num_parts, num_parts=num_parts, result=result)(products.unsqueeze(0), out)
    return out
