"""start_streams on CUDA: a thread reads some channels once and writes them to every stream."""

import math

import tilelang.language as T
import torch
from torch import Tensor

from tilelang_ops.common.kernels import cuda_kernel

THREADS = 128


@cuda_kernel(
    builds=lambda model: [
        {"width": model.hidden_size, "num_streams": model.hc_mult, "source": "bfloat16", "result": "bfloat16"}
    ]
)
def kernel(width: int, num_streams: int, source: str, result: str):
    n, vocab = T.dynamic("n"), T.dynamic("vocab")
    lanes = math.gcd(width, 8)
    pieces = width // lanes

    @T.prim_func
    def start_streams(
        table: T.Tensor((vocab, width), source),
        token_ids: T.Tensor((n,), "int32"),
        streams: T.Tensor((n, num_streams, width), result),
        pre: T.Tensor((n, num_streams), "float32"),
    ):
        with T.Kernel(n, T.ceildiv(pieces, THREADS), threads=THREADS) as (row, part):  # y ends at 65,535
            piece = part * THREADS + T.get_thread_binding()
            values = T.alloc_local((lanes,), result)
            token = T.alloc_local((1,), "int32")
            token[0] = token_ids[row]
            if piece < pieces:
                for j in T.vectorized(lanes):
                    values[j] = T.cast(table[token[0], piece * lanes + j], result)
                for m in T.unroll(num_streams):
                    for j in T.vectorized(lanes):
                        streams[row, m, piece * lanes + j] = values[j]
            if piece < num_streams:
                pre[row, piece] = T.if_then_else(piece == 0, T.float32(1.0), T.float32(0.0))

    return start_streams


def run(table: Tensor, token_ids: Tensor, num_streams: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    (n,), width = token_ids.shape, table.shape[1]
    streams = torch.empty(n, num_streams, width, dtype=dtype, device=token_ids.device)
    pre = torch.empty(n, num_streams, device=token_ids.device)
    source, result = (str(t).removeprefix("torch.") for t in (table.dtype, dtype))
    program = kernel(width=width, num_streams=num_streams, source=source, result=result)
    program(table, token_ids.contiguous(), streams, pre)
    return streams, pre
