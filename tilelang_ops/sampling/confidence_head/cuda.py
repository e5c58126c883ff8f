"""confidence_head on CUDA: a warp per draft; lanes take channels in turn, then add up as a tree."""

import tilelang.language as T
import torch
from torch import Tensor

from tilelang_ops.common.kernels import cuda_kernel

WARPS = 4
LANES = 8  # channels that a thread takes at once


@cuda_kernel(
    builds=lambda model: [
        {
            "hidden_size": model.hidden_size,
            "rank": model.dspark_markov_rank,
            "dtype": "bfloat16",
            "weight_dtype": "bfloat16",
        }
    ]
)
def kernel(hidden_size: int, rank: int, dtype: str, weight_dtype: str):
    n = T.dynamic("n")
    steps = T.dynamic("steps")

    @T.macro
    def add_products(total, values, weight, step, seq, lane, first, size):
        own = T.alloc_local((LANES,), dtype)
        other = T.alloc_local((LANES,), weight_dtype)
        for i in T.serial(T.ceildiv(size, 32 * LANES)):
            at = (i * 32 + lane) * LANES
            if size % LANES == 0 and first % LANES == 0:
                if at < size:
                    for j in T.vectorized(LANES):
                        own[j] = values[step, seq, at + j]
                    for j in T.vectorized(LANES):
                        other[j] = weight[first + at + j]
                    for j in T.unroll(LANES):
                        total[0] = total[0] + T.cast(own[j], "float32") * T.cast(other[j], "float32")
            else:
                for j in T.unroll(LANES):
                    if at + j < size:
                        product = T.cast(values[step, seq, at + j], "float32") * T.cast(
                            weight[first + at + j], "float32"
                        )
                        total[0] = total[0] + product

    @T.prim_func
    def confidence_head(
        hidden: T.Tensor((steps, n, hidden_size), dtype),
        markov_rows: T.Tensor((steps, n, rank), dtype),
        weight: T.Tensor((hidden_size + rank,), weight_dtype),
        temperatures: T.Tensor((steps,), "float32"),
        offsets: T.Tensor((steps,), "float32"),
        logits: T.Tensor((n, steps), "float32"),
        confidences: T.Tensor((n, steps), "float32"),
        bound: T.float32,
    ):
        with T.Kernel(T.ceildiv(n, WARPS), steps, threads=32 * WARPS) as (block, step):
            thread = T.get_thread_binding(0)
            seq = block * WARPS + thread // 32
            total = T.alloc_local((1,), "float32")
            total[0] = T.float32(0.0)
            if seq < n:
                add_products(total, hidden, weight, step, seq, thread % 32, 0, hidden_size)
                add_products(total, markov_rows, weight, step, seq, thread % 32, hidden_size, rank)
            for offset in (16, 8, 4, 2, 1):
                other = T.shfl_xor(total[0], offset)
                total[0] = total[0] + other
            if seq < n and thread % 32 == 0:
                scaled = T.ieee_fdiv(total[0], temperatures[step]) + offsets[step]
                logits[seq, step] = total[0]
                confidences[seq, step] = 1.0 / (1.0 + T.exp(-T.max(T.min(scaled, bound), -bound)))

    return confidence_head


def run(
    hidden: Tensor, markov_rows: Tensor, weight: Tensor, temperatures: Tensor, offsets: Tensor, bound: float
) -> tuple[Tensor, Tensor]:
    steps, n, hidden_size = hidden.shape
    logits = torch.empty(n, steps, dtype=torch.float32, device=hidden.device)
    confidences = torch.empty_like(logits)
    if logits.numel() > 0:
        dtype, weight_dtype = (str(t.dtype).removeprefix("torch.") for t in (hidden, weight))
        program = kernel(
            hidden_size=hidden_size, rank=markov_rows.shape[2], dtype=dtype, weight_dtype=weight_dtype
        )
        inputs = (t.contiguous() for t in (hidden, markov_rows, weight, temperatures, offsets))
        program(*inputs, logits, confidences, bound)
    return logits, confidences
