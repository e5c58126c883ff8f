"""copy_rows on CUDA: a thread holds 16 bytes of every source before it writes any target.

Columns of the pool do not meet, so no thread waits for another. Many pairs at once would not fit a thread's
registers; they go through a copy of the sources.
"""

import tilelang.language as T
import torch
from torch import Tensor

from tilelang_ops.common.kernels import cuda_kernel

THREADS = 128
MOST = (8, 32)  # pairs that a thread holds; a program for each
LANES = 4


@cuda_kernel(builds=lambda model: [{"most": most} for most in MOST])
def kernel(most: int):
    """At most `most` pairs; rows of 16-byte columns."""
    n, rows, columns = T.dynamic("n"), T.dynamic("rows"), T.dynamic("columns")

    @T.prim_func
    def copy_rows(pool: T.Tensor((rows, columns, LANES), "int32"), pairs: T.Tensor((n, 2), "int32")):
        with T.Kernel(T.ceildiv(columns, THREADS), threads=THREADS) as block:
            column = block * THREADS + T.get_thread_binding()
            held = T.alloc_local((most, LANES), "int32")
            if column < columns:
                for i in T.unroll(most):
                    if i < n:
                        for j in T.vectorized(LANES):
                            held[i, j] = pool[pairs[i, 0], column, j]
                for i in T.unroll(most):
                    if i < n:
                        for j in T.vectorized(LANES):
                            pool[pairs[i, 1], column, j] = held[i, j]

    return copy_rows


@cuda_kernel(builds=lambda model: [{"gathers": True}, {"gathers": False}])
def move_rows(gathers: bool):
    """Rows out of the pool to `rows`, or from there to their targets."""
    n, size, columns = T.dynamic("n"), T.dynamic("size"), T.dynamic("columns")

    @T.prim_func
    def move_rows(
        pool: T.Tensor((size, columns, LANES), "int32"),
        pairs: T.Tensor((n, 2), "int32"),
        rows: T.Tensor((n, columns, LANES), "int32"),
    ):
        with T.Kernel(T.ceildiv(columns, THREADS), n, threads=THREADS) as (block, i):
            column = block * THREADS + T.get_thread_binding()
            row = T.alloc_var("int32", init=pairs[i, 0 if gathers else 1])
            if column < columns:
                for j in T.vectorized(LANES):
                    if gathers:
                        rows[i, column, j] = pool[row, column, j]
                    else:
                        pool[row, column, j] = rows[i, column, j]

    return move_rows


def run(pool: Tensor, pairs: Tensor) -> None:
    num_bytes = pool.shape[1] * pool.element_size()
    assert num_bytes % 16 == 0, f"{pool.shape=}: rows are copied in pieces of 16 bytes"
    pairs = pairs.contiguous()
    words = pool.view(torch.int32).view(pool.shape[0], num_bytes // 16, LANES)
    most = next((most for most in MOST if pairs.shape[0] <= most), None)
    if most is not None:
        kernel(most=most)(words, pairs)
        return
    rows = words.new_empty(pairs.shape[0], *words.shape[1:])
    move_rows(gathers=True)(words, pairs, rows)
    move_rows(gathers=False)(words, pairs, rows)
