"""index_scores on CUDA: keys are decoded to bfloat16, which is exact, and multiplied by the tensor cores.

A thread block takes four rows and a run of keys, tile after tile: [KEYS, 128] keys times [128, rows * heads]
queries. Rows of several sequences are served one sequence after the other. The sum over heads is taken in the
accumulators, in one order. On sm_100a accumulators lie in tensor memory.
"""

import tilelang.language as T
import torch
from tilelang.cuda import language as TC
from torch import Tensor

from tilelang_ops.common.cuda_numerics import e2m1_value, e8m0_value, record_row
from tilelang_ops.common.kernels import cuda_kernel
from tilelang_ops.common.records import flat_rows, rows_per_part

WIDTH = 128
KEYS = 128  # of a tile
TILES = 8  # of a thread block
THREADS = 256
COLUMNS = 128  # rows times heads of a thread block
WORDS = WIDTH // 8


@cuda_kernel(builds=lambda model: [{"heads": model.index_n_heads, "is_float": False}], uses_tensor_cores=True)
def kernel(heads: int, is_float: bool, arch: str):
    n, width = T.dynamic("n"), T.dynamic("width")
    sequences, max_blocks = T.dynamic("sequences"), T.dynamic("max_blocks")
    pool_rows, scale_rows = T.dynamic("pool_rows"), T.dynamic("scale_rows")
    rows = COLUMNS // heads  # of a thread block
    code_shape, code_dtype = ((WIDTH,), "float32") if is_float else ((WORDS,), "int32")
    on_tmem = arch == "sm_100a"

    @T.prim_func
    def index_scores(
        q: T.Tensor((n, heads * WIDTH), "bfloat16"),
        weights: T.Tensor((n, heads), "float32"),
        codes: T.Tensor((pool_rows, *code_shape), code_dtype),
        scales: T.Tensor((scale_rows,), "int32"),
        block_tables: T.Tensor((sequences, max_blocks), "int32"),
        row_seq: T.Tensor((n,), "int32"),
        num_visible: T.Tensor((n,), "int32"),
        out: T.Tensor((n, width), "float32"),
        entries: T.int32,
        stride: T.int32,
        scale_stride: T.int32,
    ):
        with T.Kernel(T.ceildiv(width, KEYS * TILES), T.ceildiv(n, rows), threads=THREADS) as (part, group):
            queries = T.alloc_shared((COLUMNS, WIDTH), "bfloat16")
            keys = T.alloc_shared((KEYS, WIDTH), "bfloat16")
            factors = T.alloc_shared((COLUMNS,), "float32")
            products = T.alloc_fragment((KEYS, COLUMNS), "float32")
            by_row = T.alloc_fragment((KEYS, rows, heads), "float32")
            sums = T.alloc_fragment((KEYS, rows), "float32")
            staged = T.alloc_shared((rows, KEYS), "float32")
            most = T.alloc_local((1,), "int32")
            first = group * rows
            if on_tmem:
                total = TC.alloc_tmem((KEYS, COLUMNS), "float32")
                arrived = TC.alloc_barrier(1)
            for i, j in T.Parallel(COLUMNS, WIDTH):
                row = first + i // heads
                queries[i, j] = T.if_then_else(
                    row < n, q[T.min(row, n - 1), (i % heads) * WIDTH + j], T.cast(0.0, "bfloat16")
                )
            for i in T.Parallel(COLUMNS):
                row = first + i // heads
                factors[i] = T.if_then_else(row < n, weights[T.min(row, n - 1), i % heads], 0.0)
            for leader in T.serial(rows):
                own = T.min(first + leader, n - 1)
                previous = T.max(own - 1, 0)
                if first + leader < n and (leader == 0 or row_seq[own] != row_seq[previous]):
                    sequence = row_seq[own]
                    most[0] = 0
                    for r in T.unroll(rows):
                        member = T.min(first + r, n - 1)
                        if first + r < n and row_seq[member] == sequence:
                            most[0] = T.max(most[0], num_visible[member])
                    for tile in T.serial(TILES):
                        start = (part * TILES + tile) * KEYS
                        if start < width:
                            if start < most[0]:
                                for i, j in T.Parallel(KEYS, WORDS):
                                    entry = start + i
                                    if entry < most[0]:
                                        record = (
                                            block_tables[sequence, entry // entries] * entries
                                            + entry % entries
                                        )
                                        place = record_row(record, entries, stride)
                                        if is_float:
                                            for c in T.vectorized(8):
                                                keys[i, j * 8 + c] = T.cast(
                                                    codes[place, j * 8 + c], "bfloat16"
                                                )
                                        else:
                                            word = codes[place, j]
                                            scale = e8m0_value(
                                                (
                                                    scales[record_row(record, entries, scale_stride)]
                                                    >> (j // 4 * 8)
                                                )
                                                & 255
                                            )
                                            for c in T.unroll(8):
                                                keys[i, j * 8 + c] = T.cast(
                                                    e2m1_value((word >> (4 * c)) & 15) * scale, "bfloat16"
                                                )
                                    else:
                                        for c in T.vectorized(8):
                                            keys[i, j * 8 + c] = T.cast(0.0, "bfloat16")
                                if on_tmem:
                                    TC.gemm(
                                        keys, queries, total, transpose_B=True, mbar=arrived, clear_accum=True
                                    )
                                    T.copy(total, products)
                                else:
                                    T.gemm(keys, queries, products, transpose_B=True, clear_accum=True)
                                for i, r, h in T.Parallel(KEYS, rows, heads):
                                    by_row[i, r, h] = (
                                        T.max(products[i, r * heads + h], 0.0) * factors[r * heads + h]
                                    )
                                T.reduce_sum(by_row, sums, dim=2)
                                for i, r in T.Parallel(KEYS, rows):
                                    staged[r, i] = sums[i, r]
                            for r, i in T.Parallel(rows, KEYS):
                                member = T.min(first + r, n - 1)
                                if first + r < n and start + i < width and row_seq[member] == sequence:
                                    out[member, start + i] = T.if_then_else(
                                        start + i < num_visible[member], staged[r, i], -T.infinity("float32")
                                    )

    return index_scores


def run(
    q: Tensor,
    weights: Tensor,
    code_pool: Tensor,
    scale_pool: Tensor | None,
    block_tables: Tensor,
    row_seq: Tensor,
    num_visible: Tensor,
    max_visible: int,
) -> Tensor:
    num_rows, heads = q.shape[:2]
    assert COLUMNS % heads == 0, f"{heads=} does not divide {COLUMNS}"
    out = torch.empty(num_rows, max_visible, dtype=torch.float32, device=q.device)
    is_float = scale_pool is None
    codes = flat_rows(code_pool) if is_float else flat_rows(code_pool).view(torch.int32)
    scales = block_tables.new_zeros(1) if is_float else flat_rows(scale_pool).view(torch.int32).flatten()
    kernel(heads=heads, is_float=is_float)(
        q.to(torch.bfloat16).flatten(1),
        weights.float().contiguous(),
        codes,
        scales,
        block_tables.contiguous(),
        row_seq.contiguous(),
        num_visible.contiguous(),
        out,
        code_pool.shape[1],
        rows_per_part(code_pool),
        1 if is_float else rows_per_part(scale_pool),
    )
    return out
