"""swiglu on CUDA: one block per row and tile of channels."""

import tilelang.language as T
import torch
from torch import Tensor

from tilelang_ops.common.kernels import cuda_kernel

TILE = 256


@cuda_kernel(
    builds=lambda model: [
        {"width": model.moe_intermediate_size, "source": "bfloat16", "result": "bfloat16", "is_weighted": w}
        for w in (False, True)
    ]
)
def kernel(width: int, source: str, result: str, is_weighted: bool):
    n = T.dynamic("n")

    @T.prim_func
    def swiglu(
        gate_up: T.Tensor((n, 2 * width), source),
        weight: T.Tensor((n,), "float32"),
        out: T.Tensor((n, width), result),
        limit: T.float32,
    ):
        with T.Kernel(n, T.ceildiv(width, TILE), threads=TILE // 2) as (row, tile):
            for j in T.Parallel(TILE):
                column = tile * TILE + j
                if column < width:
                    gate = T.min(T.cast(gate_up[row, column], "float32"), limit)
                    up = T.max(T.min(T.cast(gate_up[row, width + column], "float32"), limit), -limit)
                    value = gate / (1.0 + T.exp(-gate)) * up
                    if is_weighted:
                        value = value * weight[row]
                    out[row, column] = T.cast(value, result)

    return swiglu


def run(gate_up: Tensor, limit: float, dtype: torch.dtype, weight: Tensor | None) -> Tensor:
    num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(num_rows, width, dtype=dtype, device=gate_up.device)
    if num_rows == 0:
        return out
    source, result = (str(d).removeprefix("torch.") for d in (gate_up.dtype, dtype))
    factors = gate_up.new_empty(num_rows, dtype=torch.float32) if weight is None else weight.reshape(-1)
    program = kernel(width=width, source=source, result=result, is_weighted=weight is not None)
    program(gate_up.contiguous(), factors, out, limit)
    return out
