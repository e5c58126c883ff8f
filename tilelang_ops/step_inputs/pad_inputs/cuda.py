"""pad_inputs on CUDA: a column of blocks for each matrix walks its buffer."""

import tilelang.language as T
from torch import Tensor

from tilelang_ops.common.kernels import cuda_kernel

THREADS = 128
BLOCKS = 16  # for each matrix; the largest, the block tables, has some ten thousand words


@cuda_kernel(builds=lambda model: [{}])
def kernel():
    num_words, num_matrices, num_targets = (
        T.dynamic(x) for x in ("num_words", "num_matrices", "num_targets")
    )

    @T.prim_func
    def pad_inputs(
        source: T.Tensor((num_words,), "int32"),
        table: T.Tensor((num_matrices, 7), "int32"),
        target: T.Tensor((num_targets,), "int32"),
    ):
        with T.Kernel(BLOCKS, num_matrices, threads=THREADS) as (block, matrix):
            first = block * THREADS + T.get_thread_binding()
            start = T.alloc_var("int32", init=table[matrix, 0])
            rows = T.alloc_var("int32", init=table[matrix, 1])
            width = T.alloc_var("int32", init=table[matrix, 2])
            place = T.alloc_var("int32", init=table[matrix, 3])
            size = T.alloc_var("int32", init=table[matrix, 4] * table[matrix, 5])
            full_width = T.alloc_var("int32", init=table[matrix, 5])
            value = T.alloc_var("int32", init=table[matrix, 6])
            for i in T.serial(T.ceildiv(size, BLOCKS * THREADS)):
                word = T.alloc_var("int32", init=i * (BLOCKS * THREADS) + first)
                if word < size:
                    row = T.alloc_var(
                        "int32",
                        init=T.cast(T.cast(word, "uint32") // T.cast(full_width, "uint32"), "int32"),
                    )
                    column = T.alloc_var("int32", init=word - row * full_width)
                    filled = T.alloc_var("int32", init=value)
                    if row < rows and column < width:
                        filled = source[start + row * width + column]
                    target[place + word] = filled

    return pad_inputs


def run(source: Tensor, table: Tensor, target: Tensor) -> None:
    kernel()(source, table, target)
