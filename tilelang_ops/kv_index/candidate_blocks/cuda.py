"""candidate_blocks on CUDA: the blocks' largest scores, then `select_entries` among them."""

import tilelang.language as T
import torch
from torch import Tensor

from tilelang_ops.common.kernels import cuda_kernel
from tilelang_ops.kv_index.select_entries.cuda import run as select_entries

THREADS = 256


@cuda_kernel(builds=lambda model: [{"block_size": model.candidate_block_size}])
def block_maxima(block_size: int):
    n, width, blocks = T.dynamic("n"), T.dynamic("width"), T.dynamic("blocks")

    @T.prim_func
    def block_maxima(
        scores: T.Tensor((n, width), "float32"),
        num_visible: T.Tensor((n,), "int32"),
        out: T.Tensor((n, blocks), "float32"),
    ):
        with T.Kernel(T.ceildiv(blocks, THREADS), n, threads=THREADS) as (tile, row):
            block = tile * THREADS + T.get_thread_binding()
            best = T.alloc_local((1,), "float32")
            if block < blocks:
                best[0] = -T.infinity("float32")
                for j in T.unroll(block_size):
                    if block * block_size + j < width:
                        best[0] = T.max(best[0], scores[row, block * block_size + j])
                if num_visible[row] > 0 and (num_visible[row] - 1) // block_size == block:
                    best[0] = T.infinity("float32")
                out[row, block] = best[0]

    return block_maxima


def run(scores: Tensor, num_visible: Tensor, block_size: int, k: int) -> Tensor:
    num_rows, width = scores.shape
    maxima = scores.new_empty(num_rows, -(-width // block_size))
    block_maxima(block_size=block_size)(scores.contiguous(), num_visible.to(torch.int32), maxima)
    return select_entries(maxima, k)
