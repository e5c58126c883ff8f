"""Programs of the experts' products in FP8 on SM90 for many rows: E4M3 weights, code by code in memory.

Such a copy of the weights takes twice the memory of MXFP4, and nothing decodes it: rows of activations are
the first operand, weights the second, both from shared memory. For few rows of an expert its bytes are what
takes the time, so there `expert_products` decode the packed weights. Codes, units and the order of sums are
the same, and so are a row's bits.
"""

import tilelang.cuda.language as T
import torch
from torch import Tensor

from tilelang_ops.common.expert_packing import BLOCK
from tilelang_ops.common.expert_products import find_expert, store_activated
from tilelang_ops.common.row_codes import UNIT, RowCodes

MANY_ROWS = 80  # of an expert in the mean, from which on this is faster on an H200
BLOCK_M, BLOCK_N = 128, 256  # activation and weight rows of a tile
CHUNK = 128  # weight rows that are multiplied at a time: what registers hold beside the sums
STAGES = 4
THREADS = 256  # that multiply, 64 rows a warp group
REGISTERS = 240  # of one of them


def wide_program(*, name, columns, width, is_gated=False):
    """A program that `expert_products.expert_program` may be replaced by.

    Args:
        name: of the launch.
        columns: weight rows of an expert.
        width: channels.
        is_gated: activate the product and write codes.
    """
    m, padded, num_offsets = T.dynamic("m"), T.dynamic("padded"), T.dynamic("num_offsets")
    weight_rows = T.dynamic("weight_rows")
    units, tiles = -(-width // UNIT), -(-columns // BLOCK_N)
    rows_of_expert, weight_width = -(-columns // BLOCK) * BLOCK, -(-width // BLOCK) * BLOCK
    chunks = range(BLOCK_N // CHUNK)

    @T.macro
    def add_chunk(x_tile, w_tile, row_scale, part, total, first):
        T.gemm(
            x_tile,
            w_tile[first : first + CHUNK, :],
            part,
            transpose_B=True,
            policy=T.GemmWarpPolicy.FullRow,
            clear_accum=True,
        )
        for i, n in T.Parallel(BLOCK_M, CHUNK):
            total[i, n] = total[i, n] + part[i, n] * row_scale[i]

    def add_chunks(x_tile, w_tile, row_scale, part, totals):
        for c in chunks:
            add_chunk(x_tile, w_tile, row_scale, part, totals[c], c * CHUNK)

    @T.macro
    def clear(total):
        T.clear(total)

    def clear_all(totals):
        for total in totals:
            clear(total)

    @T.macro
    def sum_all(x, scales, weights, totals, first_weight, first_row, count):
        x_tile = T.alloc_shared((BLOCK_M, UNIT), "float8_e4m3fn")
        w_tile = T.alloc_shared((BLOCK_N, UNIT), "float8_e4m3fn")
        s_tile = T.alloc_shared((1, BLOCK_M), "float32")
        part = T.alloc_fragment((BLOCK_M, CHUNK), "float32")
        row_scale = T.alloc_fragment((BLOCK_M,), "float32")
        clear_all(totals)
        for unit in T.Pipelined(T.if_then_else(count > 0, units, 0), num_stages=STAGES):
            T.copy(x[first_row, unit * UNIT], x_tile)
            T.copy(weights[first_weight, unit * UNIT], w_tile)
            T.copy(scales[unit, first_row], s_tile)
            for i in T.Parallel(BLOCK_M):
                row_scale[i] = s_tile[0, i]
            add_chunks(x_tile, w_tile, row_scale, part, totals)

    @T.macro
    def stage_chunk(total, references, staged, first_weight, first):
        reference = T.alloc_fragment((CHUNK,), "float32")
        for n in T.Parallel(CHUNK):
            reference[n] = 0.0
            if first_weight + first + n < weight_rows:
                reference[n] = references[first_weight + first + n]
        for i, n in T.Parallel(BLOCK_M, CHUNK):
            staged[i, first + n] = T.cast(total[i, n] * reference[n], "bfloat16")

    def stage_all(totals, references, staged, first_weight):
        for c in chunks:
            stage_chunk(totals[c], references, staged, first_weight, c * CHUNK)

    @T.macro
    def run(x, scales, weights, references, offsets, index, slot, finish, outputs):
        T.annotate_producer_reg_dealloc(24)
        T.annotate_consumer_reg_alloc(REGISTERS)
        totals = [T.alloc_fragment((BLOCK_M, CHUNK), "float32") for _ in chunks]
        found = T.alloc_shared((2,), "int32")
        find_expert(offsets, num_offsets - 1, slot, found, BLOCK_M)
        expert = found[0]
        first_row = offsets[expert] + found[1] * BLOCK_M
        count = T.min(offsets[expert + 1] - first_row, BLOCK_M)
        first_weight = expert * rows_of_expert + index * BLOCK_N
        sum_all(x, scales, weights, totals, first_weight, first_row, count)
        staged = T.alloc_shared((BLOCK_M, BLOCK_N + 8), "bfloat16")
        stage_all(totals, references, staged, first_weight)
        finish(staged, outputs, first_row, count, index)

    @T.macro
    def finish_plain(staged, outputs, first_row, count, index):
        for i, n in T.Parallel(BLOCK_M, BLOCK_N):
            if i < count and index * BLOCK_N + n < columns:
                outputs[0][first_row + i, index * BLOCK_N + n] = staged[i, n]

    @T.macro
    def finish_gated(staged, outputs, first_row, count, index):
        out, out_scales, factors, limit = outputs
        first_column = index * (BLOCK_N // 2)
        store_activated(
            staged, out, out_scales, factors, limit, first_row, count, first_column, columns // 2, THREADS
        )

    if not is_gated:

        @T.prim_func
        def program(
            x: T.Tensor((m, width), "float8_e4m3fn"),
            scales: T.Tensor((units, padded), "float32"),
            weights: T.Tensor((weight_rows, weight_width), "float8_e4m3fn"),
            references: T.Tensor((weight_rows,), "float32"),
            offsets: T.Tensor((num_offsets,), "int32"),
            out: T.Tensor((m, columns), "bfloat16"),
        ):
            with T.Kernel(tiles, m // BLOCK_M + num_offsets - 1, threads=THREADS) as (index, slot):
                run(x, scales, weights, references, offsets, index, slot, finish_plain, (out,))

    else:

        @T.prim_func
        def program(
            x: T.Tensor((m, width), "float8_e4m3fn"),
            scales: T.Tensor((units, padded), "float32"),
            weights: T.Tensor((weight_rows, weight_width), "float8_e4m3fn"),
            references: T.Tensor((weight_rows,), "float32"),
            offsets: T.Tensor((num_offsets,), "int32"),
            factors: T.Tensor((m,), "float32"),
            out: T.Tensor((m, columns // 2), "float8_e4m3fn"),
            out_scales: T.Tensor((T.ceildiv(columns // 2, UNIT), padded), "float32"),
            limit: T.float32,
        ):
            with T.Kernel(tiles, m // BLOCK_M + num_offsets - 1, threads=THREADS) as (index, slot):
                outputs = out, out_scales, factors, limit
                run(x, scales, weights, references, offsets, index, slot, finish_gated, outputs)

    return program.with_attr("global_symbol", name)


def serves(rows: RowCodes, num_experts: int, codes: Tensor | None) -> bool:
    """Whether such a program is there and the faster one."""
    return codes is not None and rows.codes.shape[0] >= MANY_ROWS * num_experts


def operands(rows: RowCodes, codes: Tensor, references: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The first arguments of a program from those of an operator."""
    weights = codes.flatten(0, 1).view(torch.float8_e4m3fn)
    return rows.codes.view(torch.float8_e4m3fn), rows.scales, weights, references.flatten()
