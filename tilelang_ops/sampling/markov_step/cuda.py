"""markov_step on CUDA: runs of tokens times the gathered vectors of up to 64 sequences.

A block takes tiles of 128 rows of `head`, one after the other; the next is on its way to registers while one
is multiplied. Tokens are drawn from the logits by `sample_tokens`: a draw inside of this program, tile by
tile, took longer than both launches.
"""

import tilelang.language as T
import torch
from tilelang.cuda import language as TC
from torch import Tensor

from tilelang_ops.common.kernels import KernelFactory, cuda_kernel
from tilelang_ops.sampling.markov_step.op import Draw
from tilelang_ops.sampling.sample_tokens import cuda as sample_tokens

TOKENS = 128  # of a tile
ROWS = 64
TILES = 8  # of a block, one after the other: about as many blocks as an H200 has processors
THREADS = 256
GROUPS = TOKENS // 4


@cuda_kernel(
    builds=lambda model: [{"vocab": model.vocab_size, "rank": model.dspark_markov_rank}],
    uses_tensor_cores=True,
)
def kernel(vocab: int, rank: int, arch: str):
    n = T.dynamic("n")
    tiles = -(-vocab // TOKENS)
    on_tmem = arch == "sm_100a"

    @T.prim_func
    def markov_step(
        base: T.Tensor((n, vocab), "float32"),
        tokens: T.Tensor((n,), "int32"),
        embed: T.Tensor((vocab, rank), "bfloat16"),
        head: T.Tensor((vocab, rank), "bfloat16"),
        logits: T.Tensor((n, vocab), "float32"),
    ):
        with T.Kernel(T.ceildiv(n, ROWS), -(-tiles // TILES), threads=THREADS) as (part, run):
            vectors = T.alloc_shared((ROWS, rank), "bfloat16")
            weights = T.alloc_shared((TOKENS, rank), "bfloat16")
            products = T.alloc_fragment((TOKENS, ROWS), "float32")
            staged = T.alloc_shared((ROWS, TOKENS + 4), "float32")
            ahead = T.alloc_fragment((TOKENS, rank), "bfloat16")
            loaded = T.alloc_fragment((ROWS, GROUPS, 4), "float32")
            first_row = part * ROWS
            if on_tmem:
                total = TC.alloc_tmem((TOKENS, ROWS), "float32")
                arrived = TC.alloc_barrier(1)
            T.copy(head[run * TILES * TOKENS, 0], ahead)
            for i, j in T.Parallel(ROWS, rank):
                row = first_row + i
                vectors[i, j] = T.if_then_else(
                    row < n, embed[tokens[T.min(row, n - 1)], j], T.cast(0.0, "bfloat16")
                )
            for turn in T.serial(TILES):
                tile = run * TILES + turn
                if tile < tiles:
                    for r, g in T.Parallel(ROWS, GROUPS):
                        row, start = first_row + r, tile * TOKENS + g * 4
                        own = T.alloc_local((4,), "float32")
                        for j in T.unroll(4):
                            own[j] = -T.infinity("float32")
                        if row < n and start < vocab:
                            for j in T.vectorized(4):
                                own[j] = base[row, start + j]
                        for j in T.unroll(4):
                            loaded[r, g, j] = own[j]
                    T.copy(ahead, weights)
                    if turn + 1 < TILES and tile + 1 < tiles:
                        T.copy(head[(tile + 1) * TOKENS, 0], ahead)
                    if on_tmem:
                        TC.gemm(weights, vectors, total, transpose_B=True, mbar=arrived, clear_accum=True)
                        T.copy(total, products)
                    else:
                        T.gemm(weights, vectors, products, transpose_B=True, clear_accum=True)
                    for i, r in T.Parallel(TOKENS, ROWS):
                        staged[r, i] = products[i, r]
                    for r, g in T.Parallel(ROWS, GROUPS):
                        row, start = first_row + r, tile * TOKENS + g * 4
                        own = T.alloc_local((4,), "float32")
                        for j in T.unroll(4):
                            own[j] = loaded[r, g, j] + staged[r, g * 4 + j]
                        if row < n and start < vocab:
                            for j in T.vectorized(4):
                                logits[row, start + j] = own[j]

    return markov_step


def run(
    base: Tensor,
    tokens: Tensor,
    embed: Tensor,
    head: Tensor,
    draw: Draw | None,
    keeps_logits: bool,
) -> tuple[Tensor | None, Tensor | None]:
    return step(kernel, base, tokens, embed, head, draw, keeps_logits)


def step(
    kernel: KernelFactory,
    base: Tensor,
    tokens: Tensor,
    embed: Tensor,
    head: Tensor,
    draw: Draw | None,
    keeps_logits: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """`run` with a device's kernel of the logits."""
    n, vocab = base.shape
    base = base.contiguous()
    logits = torch.empty_like(base)
    kernel(vocab=vocab, rank=head.shape[1])(base, tokens.contiguous(), embed, head, logits)
    token_ids = None
    if draw is not None:
        off = tokens.new_zeros(n), base.new_ones(n), base.new_zeros(n)
        streams = draw.seeds, draw.token_index, draw.domain
        token_ids, _ = sample_tokens.run(logits, draw.inv_temperature, *off, *streams)
    return token_ids, logits if keeps_logits else None
