"""collapse_streams on CUDA: the kernel of `mean_streams` with weights."""

import torch
from torch import Tensor

from tilelang_ops.hyper_connection.mean_streams.cuda import kernel


def run(streams: Tensor, pre: Tensor) -> Tensor:
    num_rows, num_streams, width = streams.shape
    out = torch.empty(num_rows, width, dtype=streams.dtype, device=streams.device)
    if num_rows > 0:
        source = str(streams.dtype).removeprefix("torch.")
        program = kernel(
            width=width, num_streams=num_streams, source=source, out_width=width, is_weighted=True
        )
        program(streams, pre.contiguous(), out, 0)
    return out
