"""draw_tokens on CUDA: a block per row, one walk; see `common/cuda_rows`."""

import tilelang.language as T
import torch
from torch import Tensor

from tilelang_ops.common import cuda_rows as rows
from tilelang_ops.common.kernels import cuda_kernel

SIZES = {"num_threads": 512, "capacity": 4096, "unroll": 2}


@cuda_kernel(
    builds=lambda model: [{"vocab": model.vocab_size, **SIZES}],
    pass_configs=rows.OPTIONS,
)
def kernel(vocab: int, num_threads: int, capacity: int, unroll: int):
    n = T.dynamic("n")

    @T.prim_func
    def draw_tokens(
        scores: T.Tensor((n, vocab), "float32"),
        seeds: T.Tensor((n,), "int64"),
        token_index: T.Tensor((n,), "int64"),
        token_ids: T.Tensor((n,), "int32"),
        domain: T.int32,
    ):
        with T.Kernel(n, threads=num_threads) as row:
            T.annotate_min_blocks_per_sm(2)
            r = rows.Row(scores, row, vocab, num_threads, capacity, unroll)
            rows.set_stream(r, seeds[row], token_index[row], domain)
            r.scale[0] = T.float32(1.0)
            rows.start_plain_draw(r)
            rows.walk(r, rows.draw_group)
            rows.finish_watch(r)
            rows.finish_draw(r)
            token = T.alloc_local((1,), "int32")
            token[0] = 0
            if rows.is_whole(r):
                token[0] = rows.packed_token(r, r.best[0])
            if r.thread == 0:
                token_ids[row] = token[0]

    return draw_tokens


def run(
    scores: Tensor,
    seeds: Tensor,
    token_index: Tensor,
    domain: int,
    **sizes: int,
) -> Tensor:
    token_ids = torch.empty(scores.shape[0], dtype=torch.int32, device=scores.device)
    program = kernel(vocab=scores.shape[1], **(sizes or SIZES))
    program(scores.contiguous(), seeds.contiguous(), token_index.contiguous(), token_ids, domain)
    return token_ids
