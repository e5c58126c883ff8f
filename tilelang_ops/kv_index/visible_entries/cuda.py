"""visible_entries on CUDA: a thread writes 4 neighbouring entries."""

import tilelang.language as T
import torch
from torch import Tensor

from tilelang_ops.common.kernels import cuda_kernel

THREADS = 128


@cuda_kernel(builds=lambda model: [{"k": model.index_topk}])
def kernel(k: int):
    n = T.dynamic("n")
    lanes = 4 if k % 4 == 0 else 1
    pieces = k // lanes

    @T.prim_func
    def visible_entries(num_visible: T.Tensor((n,), "int32"), out: T.Tensor((n, k), "int32")):
        with T.Kernel(T.ceildiv(n * pieces, THREADS), threads=THREADS) as block:
            flat = block * THREADS + T.get_thread_binding()
            row, piece = flat // pieces, flat % pieces
            if row < n:
                visible = T.alloc_var("int32", init=num_visible[row])
                for j in T.vectorized(lanes):
                    entry = piece * lanes + j
                    out[row, entry] = T.if_then_else(entry < visible, entry, -1)

    return visible_entries


def run(num_visible: Tensor, k: int) -> Tensor:
    out = torch.empty(num_visible.shape[0], k, dtype=torch.int32, device=num_visible.device)
    kernel(k=k)(num_visible, out)
    return out
