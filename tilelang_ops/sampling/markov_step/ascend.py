"""markov_step on Ascend 950: vector cores gather vectors and add base logits, cube cores multiply.

A cube core takes 128 sequences and a run of tokens, tile after tile: [sequences, rank] gathered vectors times
[rank, 128] rows of `head`. Each of its two vector cores gathers half of the sequences, and adds their base
logits to the products.

It is lowered to AscendC source in the tests and emulated, and has not run on a device.
"""

import tilelang.ascend.language as T
from torch import Tensor

from tilelang_ops.common.cube import CUBE_CORES, THREADS
from tilelang_ops.common.kernels import ascend_kernel
from tilelang_ops.sampling.markov_step.cuda import step
from tilelang_ops.sampling.markov_step.op import Draw

ROWS = 128  # sequences of a tile
HALF = ROWS // 2  # of a vector core
TOKENS = 128  # of a tile
TILES = 16  # of a run
MAX_RANK = 256  # that a product takes at once


@ascend_kernel(
    builds=lambda model: [{"vocab": model.vocab_size, "rank": model.dspark_markov_rank}],
    uses_tensor_cores=True,
)
def kernel(vocab: int, rank: int):
    assert rank <= MAX_RANK, f"{rank=}: markov_step takes at most {MAX_RANK} on Ascend"
    n = T.dynamic("n")
    tiles = -(-vocab // TOKENS)
    runs = -(-tiles // TILES)

    @T.macro
    def gather(tokens, embed, gathered, first_row):
        """The vectors of half a tile's sequences; zeros behind the last."""
        with T.SimtVF(threads=THREADS):
            for i, j in T.Parallel(HALF, rank):
                row = first_row + i
                gathered[i, j] = T.cast(T.float32(0.0), "bfloat16")
                if row < n:
                    token = T.alloc_var("int32", tokens[row])
                    gathered[i, j] = embed[token, j]

    @T.macro
    def add_base(products, base, logits, first_row, start):
        with T.SimtVF(threads=THREADS):
            for i, j in T.Parallel(HALF, TOKENS):
                row, token = first_row + i, start + j
                if row < n and token < vocab:
                    logits[row, token] = base[row, token] + products[i, j]

    @T.prim_func
    def markov_step(
        base: T.Tensor((n, vocab), "float32"),
        tokens: T.Tensor((n,), "int32"),
        embed: T.Tensor((vocab, rank), "bfloat16"),
        head: T.Tensor((vocab, rank), "bfloat16"),
        logits: T.Tensor((n, vocab), "float32"),
    ):
        with T.MixedKernel(CUBE_CORES) as (core, sid):
            vectors = T.alloc_l1((ROWS, rank), "bfloat16")
            weights = T.alloc_l1((TOKENS, rank), "bfloat16")
            total = T.alloc_l0c((ROWS, TOKENS), "float32")
            gathered = T.alloc_shared((HALF, rank), "bfloat16")
            products = T.alloc_shared((HALF, TOKENS), "float32")
            for turn in T.serial(T.ceildiv(T.ceildiv(n, ROWS) * runs - core, CUBE_CORES)):
                unit = turn * CUBE_CORES + core
                first_row = unit // runs * ROWS + sid * HALF
                gather(tokens, embed, gathered, first_row)
                T.copy(gathered, vectors[sid * HALF : sid * HALF + HALF, :])
                for at in T.serial(T.min(TILES, tiles - unit % runs * TILES)):
                    start = (unit % runs * TILES + at) * TOKENS
                    T.copy(head[start : start + TOKENS, :], weights)
                    T.gemm(vectors, weights, total, transpose_B=True, clear_accum=True)
                    T.dual_copy(total, products)
                    add_base(products, base, logits, first_row, start)

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
