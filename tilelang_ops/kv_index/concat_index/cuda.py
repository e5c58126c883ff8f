"""concat_index on CUDA: a thread moves 4 neighbouring record numbers."""

import tilelang.language as T
import torch
from torch import Tensor

from tilelang_ops.common.kernels import cuda_kernel

THREADS = 128


@cuda_kernel(builds=lambda model: [{"w": model.sliding_window, "k": model.index_topk}])
def kernel(w: int, k: int):
    n = T.dynamic("n")
    lanes = 4 if w % 4 == 0 and k % 4 == 0 else 1
    pieces = (w + k) // lanes

    @T.prim_func
    def concat_index(
        window: T.Tensor((n, w), "int32"),
        selected: T.Tensor((n, k), "int32"),
        out: T.Tensor((n, w + k), "int32"),
        window_offset: T.int32,
        selected_offset: T.int32,
    ):
        with T.Kernel(T.ceildiv(n * pieces, THREADS), threads=THREADS) as block:
            flat = block * THREADS + T.get_thread_binding()
            row, piece = flat // pieces, flat % pieces
            record = T.alloc_local((lanes,), "int32")
            offset = T.alloc_var("int32", init=window_offset)
            if row < n:
                if piece * lanes < w:
                    for j in T.vectorized(lanes):
                        record[j] = window[row, piece * lanes + j]
                else:
                    offset = selected_offset
                    for j in T.vectorized(lanes):
                        record[j] = selected[row, piece * lanes - w + j]
                for j in T.vectorized(lanes):
                    out[row, piece * lanes + j] = T.if_then_else(record[j] < 0, -1, record[j] + offset)

    return concat_index


def run(window: Tensor, selected: Tensor, window_offset: int, selected_offset: int) -> Tensor:
    n, w = window.shape
    k = selected.shape[1]
    out = torch.empty(n, w + k, dtype=torch.int32, device=window.device)
    kernel(w=w, k=k)(window.contiguous(), selected.contiguous(), out, window_offset, selected_offset)
    return out
