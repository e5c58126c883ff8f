"""candidate_blocks on CUDA: the blocks' largest scores, then `select_entries` among them."""

import tilelang.language as T
import torch
from torch import Tensor

from tilelang_ops.common.kernels import cuda_kernel
from tilelang_ops.kv_index.select_entries.cuda import run as select_entries

THREADS = 256
VECTOR = 4
BLOCKS = 2  # of a thread, all loaded before one is used


@cuda_kernel(builds=lambda model: [{"block_size": model.candidate_block_size, "vector": VECTOR}])
def block_maxima(block_size: int, vector: int):
    """Largest score of each block.

    Args:
        block_size: entries of a block.
        vector: scores that are loaded at once: VECTOR where blocks consist of such vectors and rows of
            blocks, else 1.
    """
    n, runs, blocks = T.dynamic("n"), T.dynamic("runs"), T.dynamic("blocks")

    @T.prim_func
    def block_maxima(
        scores: T.Tensor((n, runs, vector), "float32"),
        num_visible: T.Tensor((n,), "int32"),
        out: T.Tensor((n, blocks), "float32"),
    ):
        with T.Kernel(T.ceildiv(blocks, THREADS * BLOCKS), n, threads=THREADS) as (tile, row):
            first = tile * (THREADS * BLOCKS) + T.get_thread_binding()
            loaded = T.alloc_local((BLOCKS * block_size,), "float32")
            best = T.alloc_local((1,), "float32")
            for b in T.unroll(BLOCKS):
                for j in T.unroll(block_size // vector):
                    place = (first + b * THREADS) * (block_size // vector) + j
                    if place < runs:
                        for v in T.vectorized(vector):
                            loaded[b * block_size + j * vector + v] = scores[row, place, v]
                    else:
                        for v in T.unroll(vector):
                            loaded[b * block_size + j * vector + v] = -T.infinity("float32")
            for b in T.unroll(BLOCKS):
                block = first + b * THREADS
                if block < blocks:
                    best[0] = -T.infinity("float32")
                    for j in T.unroll(block_size):
                        best[0] = T.max(best[0], loaded[b * block_size + j])
                    if num_visible[row] > 0 and (num_visible[row] - 1) // block_size == block:
                        best[0] = T.infinity("float32")
                    out[row, block] = best[0]

    return block_maxima


def run(scores: Tensor, num_visible: Tensor, block_size: int, k: int) -> Tensor:
    num_rows, width = scores.shape
    scores = scores.contiguous()
    is_whole = width % block_size == 0 and block_size % VECTOR == 0 and scores.data_ptr() % 16 == 0
    vector = VECTOR if is_whole else 1
    maxima = scores.new_empty(num_rows, -(-width // block_size))
    block_maxima(block_size=block_size, vector=vector)(
        scores.view(num_rows, -1, vector), num_visible.to(torch.int32), maxima
    )
    return select_entries(maxima, k)
