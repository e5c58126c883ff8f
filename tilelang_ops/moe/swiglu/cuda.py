"""swiglu on CUDA: the kernel of `swiglu_quantize` without the encoding."""

import torch
from torch import Tensor

from tilelang_ops.moe.swiglu_quantize.cuda import launch


def run(
    gate_up: Tensor, limit: float, dtype: torch.dtype, weight: Tensor | None, rounds: bool = False
) -> Tensor:
    return launch(gate_up, limit, dtype, weight, None, rounds=rounds)[0]
