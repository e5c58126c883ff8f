"""grouped_swiglu_mxfp4 on Ascend 950: grouped_linear_mxfp4, and the vector cores activate its tiles."""

import torch
from torch import Tensor

from tilelang_ops.common.cube import cube_program
from tilelang_ops.common.kernels import ascend_kernel


@ascend_kernel(
    builds=lambda model: [
        {"inner": model.moe_intermediate_size, "width": model.hidden_size, "round_output": True}
    ],
    uses_tensor_cores=True,
)
def kernel(inner: int, width: int, round_output: bool):
    return cube_program(
        name="grouped_swiglu_mxfp4",
        fmt="mxfp4",
        columns=2 * inner,
        width=width,
        result="bfloat16",
        is_grouped=True,
        is_gated=True,
        round_output=round_output,
    )


def run(
    x: Tensor,
    weights: Tensor,
    offsets: Tensor,
    factors: Tensor,
    limit: float,
    inner: int,
    round_output: bool,
) -> Tensor:
    out = x.new_empty(x.shape[0], inner)
    program = kernel(inner=inner, width=x.shape[1], round_output=round_output)
    program(x.contiguous(), weights.view(torch.uint32).flatten(0, 1), offsets, factors, out, limit)
    return out
