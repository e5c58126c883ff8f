"""gather_columns on CUDA: a thread an element."""

import tilelang.language as T
from torch import Tensor

from tilelang_ops.common.kernels import cuda_kernel

THREADS = 128


@cuda_kernel(builds=lambda model: [{}])
def kernel():
    num_rows, n, k, width = (T.dynamic(name) for name in ("num_rows", "n", "k", "width"))

    @T.prim_func
    def gather_columns(
        src: T.Tensor((num_rows, n), "float32"),
        index: T.Tensor((k,), "int64"),
        out: T.Tensor((num_rows, width), "float32"),
    ):
        with T.Kernel(T.ceildiv(k, THREADS), num_rows, threads=THREADS) as (block, row):
            for t in T.Parallel(THREADS):
                if block * THREADS + t < k:
                    out[row, block * THREADS + t] = src[row, index[block * THREADS + t]]

    return gather_columns


def run(src: Tensor, index: Tensor, width: int) -> Tensor:
    out = src.new_empty(src.shape[0], width)
    kernel()(src, index.contiguous(), out)
    return out
