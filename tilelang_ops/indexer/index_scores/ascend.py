"""index_scores on Ascend 950: vector cores decode keys to bfloat16 and sum heads, cube cores multiply.

A cube core takes four rows of a sequence and a run of keys, tile after tile: [KEYS, 128] keys times
[128, rows * heads] queries. Each of its two vector cores decodes half of a tile's keys and makes scores of
their products: a thread sums the heads of a key and a row in order.

It is lowered to AscendC source in the tests and emulated, and has not run on a device.
"""

import tilelang.ascend.language as T
import torch
from torch import Tensor

from tilelang_ops.common.cube import CUBE_CORES, THREADS, quotient, remainder
from tilelang_ops.common.cuda_numerics import e2m1_value, e8m0_value
from tilelang_ops.common.kernels import ascend_kernel
from tilelang_ops.common.records import flat_rows, rows_per_part

WIDTH = 128
KEYS = 128  # of a tile
HALF = KEYS // 2  # of a vector core
TILES = 8  # of a run
COLUMNS = 128  # rows times heads of a tile
WORDS = WIDTH // 8


@ascend_kernel(
    builds=lambda model: [{"heads": model.index_n_heads, "is_float": False}], uses_tensor_cores=True
)
def kernel(heads: int, is_float: bool):
    n, lines, width = T.dynamic("n"), T.dynamic("lines"), T.dynamic("width")
    sequences, max_blocks = T.dynamic("sequences"), T.dynamic("max_blocks")
    pool_rows, scale_rows = T.dynamic("pool_rows"), T.dynamic("scale_rows")
    rows = COLUMNS // heads  # of a tile
    code_shape, code_dtype = ((WIDTH,), "float32") if is_float else ((WORDS,), "int32")

    @T.macro
    def decode(codes, scales, block_tables, row_seq, num_visible, unpacked, rows_of, first, places):
        """Keys first, first + 1, ... of a sequence; zeros where none of its rows sees them."""
        entries, stride, scale_stride = places
        sequence, first_row, num_rows = rows_of
        with T.SimtVF(threads=THREADS):
            for i, j in T.Parallel(HALF, WORDS):
                entry = first + i
                most = T.alloc_var("int32", 0)
                for r in T.serial(rows):
                    row = T.min(first_row + r, n - 1)
                    if r < num_rows and row_seq[row] == sequence:
                        most = T.max(most, num_visible[row])
                if entry < most:
                    block = T.alloc_var("int32", quotient(entry, entries))
                    place = T.alloc_var("int32", remainder(entry, entries))
                    block = block_tables[sequence, block]
                    if is_float:
                        place = block * stride + place
                        for c in (0, 1, 2, 3, 4, 5, 6, 7):
                            unpacked[i, j * 8 + c] = T.cast(codes[place, j * 8 + c], "bfloat16")
                    else:
                        scale_word = T.alloc_var("int32", scales[block * scale_stride + place])
                        word = T.alloc_var("int32", codes[block * stride + place, j])
                        scale = e8m0_value((scale_word >> (j // 4 * 8)) & 255)
                        for c in (0, 1, 2, 3, 4, 5, 6, 7):
                            value = e2m1_value((word >> (4 * c)) & 15) * scale
                            unpacked[i, j * 8 + c] = T.cast(value, "bfloat16")
                else:
                    for c in (0, 1, 2, 3, 4, 5, 6, 7):
                        unpacked[i, j * 8 + c] = T.cast(T.float32(0.0), "bfloat16")

    @T.macro
    def sum_heads(products, weights, row_seq, num_visible, out, rows_of, first):
        """Scores of half a tile's keys for the rows of a sequence."""
        sequence, first_row, num_rows = rows_of
        with T.SimtVF(threads=THREADS):
            for r, i in T.Parallel(rows, HALF):
                row = T.min(first_row + r, n - 1)
                if r < num_rows and first + i < width and row_seq[row] == sequence:
                    score = T.alloc_var("float32", 0.0)
                    for h in T.serial(heads):
                        product = T.max(products[i, r * heads + h], T.float32(0.0))
                        score = score + product * weights[row, h]
                    out[row, first + i] = T.if_then_else(
                        first + i < num_visible[row], score, -T.infinity("float32")
                    )

    @T.prim_func
    def index_scores(
        q: T.Tensor((lines, WIDTH), "bfloat16"),
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
        with T.MixedKernel(CUBE_CORES) as (core, sid):
            queries = T.alloc_l1((COLUMNS, WIDTH), "bfloat16")
            keys = T.alloc_l1((KEYS, WIDTH), "bfloat16")
            total = T.alloc_l0c((KEYS, COLUMNS), "float32")
            unpacked = T.alloc_shared((HALF, WIDTH), "bfloat16")
            products = T.alloc_shared((HALF, COLUMNS), "float32")
            parts = T.ceildiv(width, KEYS * TILES)
            for turn in T.serial(T.ceildiv(n * parts - core, CUBE_CORES)):
                unit = turn * CUBE_CORES + core
                row = T.alloc_var("int32", quotient(unit, parts))
                part = T.alloc_var("int32", remainder(unit, parts))
                sequence = T.alloc_var("int32", row_seq[row])
                if row % rows == 0 or sequence != row_seq[T.max(row - 1, 0)]:
                    rows_of = sequence, row, T.min(rows - row % rows, n - row)
                    T.copy(q[row * heads : row * heads + COLUMNS, :], queries)
                    for tile in T.serial(T.min(TILES, T.ceildiv(width - part * TILES * KEYS, KEYS))):
                        first = (part * TILES + tile) * KEYS + sid * HALF
                        places = entries, stride, scale_stride
                        with T.Stage(0):
                            decode(
                                codes,
                                scales,
                                block_tables,
                                row_seq,
                                num_visible,
                                unpacked,
                                rows_of,
                                first,
                                places,
                            )
                        T.copy(unpacked, keys[sid * HALF : sid * HALF + HALF, :])
                        T.gemm(keys, queries, total, transpose_B=True, clear_accum=True)
                        T.dual_copy(total, products)
                        sum_heads(products, weights, row_seq, num_visible, out, rows_of, first)

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
        q.to(torch.bfloat16).flatten(0, 1).contiguous(),
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
