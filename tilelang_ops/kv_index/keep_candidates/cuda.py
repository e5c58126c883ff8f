"""keep_candidates on CUDA: a thread block flags its part of a row's blocks, then clears the others."""

import tilelang.language as T
from torch import Tensor

from tilelang_ops.common.kernels import cuda_kernel

THREADS = 256
TILE = 1024  # blocks of entries that one thread block goes through


@cuda_kernel(
    builds=lambda model: [{"k": model.candidate_topk_blocks, "block_size": model.candidate_block_size}]
)
def kernel(k: int, block_size: int):
    n, width = T.dynamic("n"), T.dynamic("width")

    @T.prim_func
    def keep_candidates(scores: T.Tensor((n, width), "float32"), blocks: T.Tensor((n, k), "int32")):
        with T.Kernel(T.ceildiv(width, TILE * block_size), n, threads=THREADS) as (tile, row):
            thread = T.get_thread_binding()
            is_kept = T.alloc_shared((TILE,), "int32")
            for i in T.serial(TILE // THREADS):
                is_kept[i * THREADS + thread] = 0
            T.sync_threads()
            for i in T.serial(T.ceildiv(k, THREADS)):
                if i * THREADS + thread < k:
                    place = blocks[row, i * THREADS + thread] - tile * TILE
                    if place >= 0 and place < TILE:
                        is_kept[place] = 1
            T.sync_threads()
            for i in T.serial(TILE * block_size // THREADS):
                entry = tile * TILE * block_size + i * THREADS + thread
                if entry < width and is_kept[(i * THREADS + thread) // block_size] == 0:
                    scores[row, entry] = -T.infinity("float32")

    return keep_candidates


def run(scores: Tensor, blocks: Tensor, block_size: int) -> None:
    kernel(k=blocks.shape[1], block_size=block_size)(scores, blocks.contiguous())
