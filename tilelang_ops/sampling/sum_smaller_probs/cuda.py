"""sum_smaller_probs on CUDA: a block per row, one walk."""

import tilelang.language as T
import torch
from torch import Tensor

from tilelang_ops.common import cuda_rows as rows
from tilelang_ops.common.kernels import cuda_kernel

SIZES = {"num_threads": 256, "unroll": 4}


@T.macro
def _add(r, base, group):
    for j in T.unroll(4):
        if r.scores[base + j] <= r.peak[0]:
            r.total[0] = r.total[0] + T.cast(T.exp(r.scores[base + j]), "float64")


@cuda_kernel(
    builds=lambda model: [{"vocab": model.vocab_size, **SIZES}],
    pass_configs=rows.OPTIONS,
)
def kernel(vocab: int, num_threads: int, unroll: int):
    n = T.dynamic("n")

    @T.prim_func
    def sum_smaller_probs(
        logprobs: T.Tensor((n, vocab), "float32"),
        token_ids: T.Tensor((n,), "int32"),
        out: T.Tensor((n,), "float32"),
    ):
        with T.Kernel(n, threads=num_threads) as row:
            r = rows.Row(logprobs, row, vocab, num_threads, 0, unroll)
            r.scale[0] = T.float32(1.0)
            r.total[0] = T.float64(0.0)
            token = T.alloc_local((1,), "int32")
            token[0] = token_ids[row]
            if token[0] >= 0:
                r.peak[0] = logprobs[row, token[0]]
                rows.walk(r, _add)
                rows.reduce_block(r, r.total, rows.added)
            if r.thread == 0:
                out[row] = T.cast(r.total[0], "float32")

    return sum_smaller_probs


def run(logprobs: Tensor, token_ids: Tensor, **sizes: int) -> Tensor:
    out = torch.empty(logprobs.shape[0], dtype=torch.float32, device=logprobs.device)
    program = kernel(vocab=logprobs.shape[1], **(sizes or SIZES))
    program(logprobs.contiguous(), token_ids.contiguous(), out)
    return out
