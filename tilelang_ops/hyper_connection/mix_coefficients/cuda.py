"""mix_coefficients on CUDA: a thread per entry of a row's matrix, whose sums are warp shuffles.

Sinkhorn rounds forget what went before them, so approximate reciprocals (1 ulp) cost no accuracy in the end.
"""

from typing import Any

import tilelang.language as T
import torch
from torch import Tensor

from tilelang_ops.common.kernels import cuda_kernel
from tilelang_ops.common.row_product import segment_count
from tilelang_ops.common.sizes import ModelSizes

THREADS = 128


def _builds(model: ModelSizes) -> list[dict[str, Any]]:
    sizes = {"num_streams": model.hc_mult, "num_rounds": model.hc_sinkhorn_iters}
    segments = segment_count(model.hc_mult * model.hidden_size)
    return [{**sizes, "num_parts": parts, "num_splits": n} for parts, n in ((1, 1), (3, segments), (3, 1))]


@cuda_kernel(builds=_builds)
def kernel(num_streams: int, num_rounds: int, num_parts: int, num_splits: int):
    """The projection may come as `num_parts` terms side by side, each in `num_splits` segments.

    Segments are a dimension of their own: an index that TileLang cannot bound is checked before each load,
    and the next one then waits for it.
    """
    n = T.dynamic("n")
    m = num_streams
    width = (2 + m) * m
    held = max(1, THREADS // (m * m))  # matrices of a block
    # Segments take many loads: then a block has one row, which all groups of threads compute.
    rows = held if num_splits == 1 else 1
    terms = num_parts * width

    @T.prim_func
    def mix_coefficients(
        projection: T.Tensor((num_splits, n, num_parts * width), "float32"),
        mean_square: T.Tensor((n,), "float32"),
        scale: T.Tensor((width,), "float32"),
        base: T.Tensor((width,), "float32"),
        pre: T.Tensor((n, m), "float32"),
        post: T.Tensor((n, m), "float32"),
        comb: T.Tensor((n, m, m), "float32"),
        eps: T.float32,
        norm_eps: T.float32,
    ):
        with T.Kernel(T.ceildiv(n, rows), threads=THREADS) as block:
            matrix = T.alloc_fragment((held, m, m), "float32")
            row_sums = T.alloc_fragment((held, m), "float32")
            column_sums = T.alloc_fragment((held, m), "float32")
            sums = T.alloc_shared((rows, terms), "float32")
            for r, t in T.Parallel(rows, terms):
                # Conditions on a register lower several times faster than on an expression of threads.
                row = T.alloc_var("int32", init=block * rows + r)
                total = T.alloc_var("float32")
                total = 0.0
                if row < n:
                    for segment in T.unroll(num_splits):
                        total = total + projection[segment, row, t]
                sums[r, t] = total
            for h, i, j in T.Parallel(held, m, m):
                row = T.alloc_var("int32", init=block * rows + h % rows)
                matrix[h, i, j] = 0.0
                if row < n:
                    entry = 2 * m + i * m + j
                    factor = 1.0 / T.sqrt(mean_square[row] + norm_eps)
                    total = T.alloc_var("float32")
                    total = 0.0
                    for part in T.unroll(num_parts):
                        total = total + sums[h % rows, part * width + entry]
                    matrix[h, i, j] = total * factor * scale[entry] + base[entry]
            for r, j in T.Parallel(rows, 2 * m):
                row = T.alloc_var("int32", init=block * rows + r)
                if row < n:
                    factor = 1.0 / T.sqrt(mean_square[row] + norm_eps)
                    total = T.alloc_var("float32")
                    total = 0.0
                    for part in T.unroll(num_parts):
                        total = total + sums[r, part * width + j]
                    z = total * factor * scale[j] + base[j]
                    gate = 1.0 / (1.0 + T.exp(-z))
                    if j < m:
                        pre[row, j] = gate + eps
                    else:
                        post[row, j - m] = gate * 2.0
            T.reduce_max(matrix, row_sums, dim=2)
            for r, i, j in T.Parallel(held, m, m):
                matrix[r, i, j] = T.exp(matrix[r, i, j] - row_sums[r, i])
            T.reduce_sum(matrix, row_sums, dim=2)
            for r, i, j in T.Parallel(held, m, m):
                matrix[r, i, j] = matrix[r, i, j] * T.fast_rcp(row_sums[r, i]) + eps
            T.reduce_sum(matrix, column_sums, dim=1)
            for r, i, j in T.Parallel(held, m, m):
                matrix[r, i, j] = matrix[r, i, j] * T.fast_rcp(column_sums[r, j] + eps)
            for _ in T.serial(num_rounds - 1):
                T.reduce_sum(matrix, row_sums, dim=2)
                for r, i, j in T.Parallel(held, m, m):
                    matrix[r, i, j] = matrix[r, i, j] * T.fast_rcp(row_sums[r, i] + eps)
                T.reduce_sum(matrix, column_sums, dim=1)
                for r, i, j in T.Parallel(held, m, m):
                    matrix[r, i, j] = matrix[r, i, j] * T.fast_rcp(column_sums[r, j] + eps)
            for r, i, j in T.Parallel(held, m, m):
                row = T.alloc_var("int32", init=block * rows + r)
                if r < rows and row < n:
                    comb[row, i, j] = matrix[r, i, j]

    return mix_coefficients


def launch(
    projection: Tensor | None,
    mean_square: Tensor,
    scale: Tensor,
    base: Tensor,
    num_streams: int,
    num_rounds: int,
    eps: float,
    norm_eps: float,
    *,
    num_parts: int = 1,
) -> tuple[Tensor, Tensor, Tensor]:
    """Of a projection [num_splits, n, num_parts * entries]; None without rows."""
    num_rows = mean_square.shape[0]
    pre = torch.empty(num_rows, num_streams, dtype=torch.float32, device=mean_square.device)
    post = torch.empty_like(pre)
    comb = pre.new_empty(num_rows, num_streams, num_streams)
    if num_rows > 0 and projection is not None:
        program = kernel(
            num_streams=num_streams,
            num_rounds=num_rounds,
            num_parts=num_parts,
            num_splits=projection.shape[0],
        )
        program(projection.contiguous(), mean_square, scale, base, pre, post, comb, eps, norm_eps)
    return pre, post, comb


def run(
    projection: Tensor,
    mean_square: Tensor,
    scale: Tensor,
    base: Tensor,
    num_streams: int,
    num_rounds: int,
    eps: float,
    norm_eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    return launch(projection.unsqueeze(0), mean_square, scale, base, num_streams, num_rounds, eps, norm_eps)
