"""Adds up the segments that blocks of a product have summed each by itself, and the terms of its weights."""

import tilelang.cuda.language as T


def sum_program(*, name, columns, num_parts, num_splits, result, threads=128):
    """out[r, c] = sum over parts of the sum over segments of partial[segment, r, part * columns + c]."""
    m = T.dynamic("m")
    step = 4 if columns % 4 == 0 and num_splits <= 16 else 1  # columns of a thread
    lanes = -(-columns // step)

    @T.prim_func
    def program(
        partial: T.Tensor((num_splits, m, num_parts * columns), "float32"),
        out: T.Tensor((m, columns), result),
    ):
        with T.Kernel(T.ceildiv(m * lanes, threads), threads=threads) as block:
            for t in T.Parallel(threads):
                row, column = (block * threads + t) // lanes, (block * threads + t) % lanes * step
                if row < m:
                    loaded = T.alloc_local((num_splits, step), "float32")
                    part_sum = T.alloc_local((step,), "float32")
                    total = T.alloc_local((step,), "float32")
                    for k in T.unroll(step):
                        total[k] = 0.0
                    for part in T.unroll(num_parts):
                        for segment in T.unroll(num_splits):  # all are under way before the first is added
                            for k in T.vectorized(step):
                                loaded[segment, k] = partial[segment, row, part * columns + column + k]
                        for k in T.unroll(step):
                            part_sum[k] = 0.0
                            for segment in T.unroll(num_splits):
                                part_sum[k] = part_sum[k] + loaded[segment, k]
                            total[k] = total[k] + part_sum[k]
                    for k in T.vectorized(step):
                        out[row, column + k] = T.cast(total[k], result)

    return program.with_attr("global_symbol", name)
