"""Programs of the experts' products in FP8 on SM90: MXFP4 weights times rows by their codes, on tensor cores.

As in `common/matrix.py` weights are the first operand (rows of the instruction) and stay packed
(`expert_packing.py`) until a thread decodes them into the registers that the instruction reads, here to E4M3:

    part[BM, BN] = W[BM, 128] x X[BN, 128]^T        from zero, on the tensor cores
    total[i, n] += part[i, n] * scale[n]            float32; scales are powers of two

A unit of 128 channels takes four instructions, which add up in place; units are added ascending. The order is
the same for every tile, so a row has the same bits in every batch.

An E2M1 code times 2^-5 .. 2^6 is an E4M3 code without a subnormal. So weights are decoded relative to one
power of two for each of their rows, with which sums are multiplied at last: exact, and the same bits as with
scales multiplied unit by unit. Four codes are decoded by one look-up of bytes in a table of the eight
magnitudes, which is shifted by adding to exponents.

A copy of scales starts at a multiple of 16 bytes, hence the rows of an expert start at multiples of 4.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from typing import Any

import tilelang.cuda.language as T
import torch
from torch import Tensor

from tilelang_ops.common.cuda_numerics import e8m0_inverse, e8m0_value, fp8_scale_byte, magnitude_bits
from tilelang_ops.common.cuda_row_codes import group_in_unit, unit_code
from tilelang_ops.common.expert_packing import BLOCK
from tilelang_ops.common.row_codes import UNIT, RowCodes

GROUP = 32  # channels of a weight's scale, and of a group that is rounded
STEP = 8  # channels of a thread that activates
STEPS = UNIT // BLOCK  # packed blocks of a unit
EXPERT_BITS = 10  # fewer than 1024 experts on a device
PROCESSORS = 132  # of an H200
CONSUMER_REGISTERS = {
    2: 240,
    3: 152,
    4: 112,
    5: 88,
}  # warp groups that multiply -> registers of their threads


@dataclass(frozen=True)
class Tile:
    """How a tile of some activation rows is computed; changes no bit.

    Attributes:
        block_m: weight rows; a warp group multiplies 64 of them.
        stages: of the pipeline.
        depth: units of a stage.
        chunks: parts of the activation rows, multiplied one after the other: more take fewer registers.
        cost: of a unit, us / 100 on an H200.
        most: rows of an expert in the mean, at most, where it is chosen whatever the cost; 0 by cost.
    """

    block_m: int
    stages: int
    depth: int = 1
    chunks: int = 1
    cost: int = 0
    most: int = 0


# Activation rows of a tile -> the rest: what was fastest on an H200.
GATED_TILES = {
    16: Tile(256, 3, depth=2, most=8),
    32: Tile(256, 3, depth=2, most=20),
    48: Tile(256, 3, depth=2, most=36),
    64: Tile(256, 3, depth=2, most=64),
    128: Tile(256, 4, chunks=4, cost=135),
}
PLAIN_TILES = {
    16: Tile(320, 3, depth=2, most=8),
    32: Tile(320, 3, depth=2, most=20),
    64: Tile(320, 5, chunks=2, most=64),
    128: Tile(192, 4, chunks=2, cost=105),
}


def tile_rows(num_rows: int, num_experts: int, columns: int, tiles: Mapping[int, Tile]) -> int:
    """Activation rows of a tile, by the mean of an expert's and by rounds of blocks over the processors.

    Args:
        num_rows, num_experts: of the batch, and experts that they are spread over.
        columns: weight rows of an expert.
        tiles: `GATED_TILES` or `PLAIN_TILES`.
    """
    mean = num_rows / num_experts
    for rows, tile in tiles.items():
        if mean <= tile.most:
            return rows

    def cost(rows: int) -> int:
        blocks = num_experts * -(-columns // tiles[rows].block_m) * ceil(mean / rows)
        return -(-blocks // PROCESSORS) * tiles[rows].cost

    return min((rows for rows, tile in tiles.items() if not tile.most), key=cost)


def operands(rows: RowCodes, weights: Tensor, references: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The first arguments of a program from those of an operator."""
    blocks = weights.view(torch.uint32).flatten(0, 1)
    return rows.codes.view(torch.float8_e4m3fn), rows.scales, blocks, references.flatten()


def decoded_word(packed, step, i, j):
    """Four E4M3 codes (uint32) of the unit from packed block `step` on: weight row i, channels from 4j on."""
    block, warp, high, lane_row = i // 64, (i % 64) // 16, (i // 8) % 2, i % 8
    at, half, right, lane = step + j // 16, (j // 8) % 2, (j // 4) % 2, lane_row * 4 + j % 4
    word = packed[block, at, (half * 2 + high) * 4 + warp, lane]
    shifts = packed[block, at, 16, warp * 8 + lane_row]
    power = (shifts >> T.cast(half * 16 + high * 8, "uint32")) & T.uint32(255)
    low = power * T.uint32(0x08080800) + T.uint32(0x14100800)  # 0, 1/2, 1, 3/2 times 2^-5
    top = power * T.uint32(0x08080808) + T.uint32(0x24201C18)  # 2, 3, 4, 6 times 2^-5
    selector = (word >> T.cast(right * 16, "uint32")) & T.uint32(0x7777)
    magnitudes = T.call_pure_extern("uint32", "__byte_perm", low, top, selector)
    return magnitudes | ((word << T.cast(right * 4, "uint32")) & T.uint32(0x80808080))


@T.macro
def find_expert(offsets, num_experts, slot, found, block_n):
    """The expert of a slot and its tile there: slots of expert e begin at e + offsets[e] // block_n.

    What is found goes through shared memory: producers and consumers would each have a copy of a thread's
    own memory.
    """
    expert = T.alloc_local((1,), "int32")
    expert[0] = 0
    for bit in T.unroll(EXPERT_BITS):
        candidate = expert[0] + (1 << (EXPERT_BITS - 1 - bit))
        if candidate < num_experts:  # noqa: SIM102  guards the load
            if offsets[candidate] // block_n <= slot - candidate:
                expert[0] = candidate
    found[0] = expert[0]
    found[1] = slot - expert[0] - offsets[expert[0]] // block_n


@T.macro
def store_activated(staged, out, scales, factors, limit, first_row, count, first_column, columns, threads):
    """Activate a tile of products, and store it by its codes.

    Args:
        staged: [rows, ..] shared bfloat16: units of 256 columns, blocks of 32 gate and 32 up columns in turn.
        out: [m, columns] E4M3 and
        scales: [units, m or more] float32 of the rows' codes.
        factors: [m] float32.
        limit: bound of the activations.
        first_row, first_column: of the tile in `out`.
        count: its rows that are some.
        columns: of `out`.
        threads: of the block, a multiple of 16.
    """
    units = staged.shape[1] // (2 * UNIT)  # of a row
    items = T.ceildiv(staged.shape[0] * units * 16, threads) * threads // 16
    groups, parts = UNIT // GROUP, GROUP // STEP
    active = T.alloc_shared((staged.shape[0], units * UNIT + 8), "bfloat16")
    largest = T.alloc_fragment((items, groups, parts), "int32")
    amax = T.alloc_fragment((items, groups), "int32")
    top = T.alloc_fragment((items,), "int32")
    for u, g, p in T.Parallel(items, groups, parts):
        i, column = u // units, (u % units * groups + g) * GROUP + p * STEP
        most = T.alloc_var("int32")
        most = 0
        if i < count:
            gate = T.alloc_local((STEP,), "float32")
            up = T.alloc_local((STEP,), "float32")
            factor = T.alloc_var("float32")
            factor = factors[first_row + i]
            for k in T.vectorized(STEP):
                gate[k] = T.cast(staged[i, column // GROUP * 64 + p * STEP + k], "float32")
            for k in T.vectorized(STEP):
                up[k] = T.cast(staged[i, column // GROUP * 64 + GROUP + p * STEP + k], "float32")
            for k in T.unroll(STEP):
                gate[k] = T.min(gate[k], limit)
                up[k] = T.max(T.min(up[k], limit), -limit)
                gate[k] = gate[k] * T.fast_rcp(1.0 + T.__exp(-gate[k])) * up[k] * factor
                gate[k] = T.cast(T.cast(gate[k], "bfloat16"), "float32")
                most = T.max(most, magnitude_bits(gate[k]))
            for k in T.vectorized(STEP):
                active[i, column + k] = T.cast(gate[k], "bfloat16")
        largest[u, g, p] = most
    T.reduce_max(largest, amax, dim=2)
    T.reduce_max(amax, top, dim=1)
    for u, g, p in T.Parallel(items, groups, parts):
        i, column = u // units, (u % units * groups + g) * GROUP + p * STEP
        if i < count and first_column + column < columns:
            byte = T.alloc_var("int32")
            byte = fp8_scale_byte(amax[u, g])
            inverse = T.alloc_var("float32")
            inverse = e8m0_inverse(byte)
            share = T.alloc_var("float32")
            share = group_in_unit(byte, fp8_scale_byte(top[u]))
            value = T.alloc_local((STEP,), "float32")
            for k in T.vectorized(STEP):
                value[k] = T.cast(active[i, column + k], "float32")
            for k in T.vectorized(STEP):
                out[first_row + i, first_column + column + k] = unit_code(value[k], inverse, share)
    for u in T.Parallel(items):
        i, unit = u // units, first_column // UNIT + u % units
        if i < count and unit * UNIT < columns:
            scales[unit, first_row + i] = e8m0_value(fp8_scale_byte(top[u]))


def expert_program(
    *, name: str, columns: int, width: int, block_n: int, tile: Tile, is_gated: bool = False
) -> Any:
    """The program of one product.

    Args:
        name: of the program.
        columns: weight rows of an expert, gate and up rows together.
        width: channels summed over.
        block_n, tile: activation rows of a tile, and the rest of it.
        is_gated: the output is activated and encoded.
    """
    m, padded, num_offsets, num_blocks = (T.dynamic(n) for n in ("m", "padded", "num_offsets", "num_blocks"))
    block_m, depth, chunk = tile.block_m, tile.depth, block_n // tile.chunks
    row_blocks, steps, units = -(-columns // BLOCK), -(-width // BLOCK), -(-width // UNIT)
    blocks, threads = block_m // BLOCK, 128 * (block_m // BLOCK)
    tiles, turns = -(-columns // block_m), -(-units // depth)
    scale_columns = -(-block_n // 32) * 32  # a stage starts at a multiple of 128 bytes

    @T.macro
    def add_chunk(decoded, x_tile, s_tile, part, total, at, first):
        T.gemm(
            decoded,
            x_tile[first : first + chunk, at * UNIT : at * UNIT + UNIT],
            part,
            transpose_B=True,
            policy=T.GemmWarpPolicy.FullRow,
            clear_accum=True,
        )
        for i, n in T.Parallel(block_m, chunk):
            total[i, n] = total[i, n] + part[i, n] * s_tile[at, first + n]

    def add_chunks(decoded, x_tile, s_tile, part, totals, at):
        for c, total in enumerate(totals):
            add_chunk(decoded, x_tile, s_tile, part, total, at, c * chunk)

    @T.macro
    def multiply(x_tile, w_tile, s_tile, words, part, totals, at):
        decoded = T.view(words, (block_m, UNIT), "float8_e4m3fn")
        for i, j in T.Parallel(block_m, UNIT // 4):
            words[i, j] = decoded_word(w_tile, at * STEPS, i, j)
        add_chunks(decoded, x_tile, s_tile, part, totals, at)

    def multiply_stage(*operands):
        for at in range(depth):
            multiply(*operands, at)

    @T.macro
    def clear(total):
        T.clear(total)

    @T.macro
    def sum_all(x, scales, weights, totals, first, first_row, count):
        x_tile = T.alloc_shared((block_n, depth * UNIT), "float8_e4m3fn")
        s_tile = T.alloc_shared((depth, scale_columns), "float32")
        w_tile = T.alloc_shared((blocks, depth * STEPS, 17, 32), "uint32")
        words = T.alloc_fragment((block_m, UNIT // 4), "uint32")
        part = T.alloc_fragment((block_m, chunk), "float32")
        for total in totals:
            clear(total)
        T.clear(words)
        T.clear(part)
        for turn in T.Pipelined(T.if_then_else(count > 0, turns, 0), num_stages=tile.stages):
            step = turn * depth * STEPS
            T.copy(x[first_row, turn * depth * UNIT], x_tile)
            T.copy(scales[turn * depth, first_row], s_tile)
            T.copy(weights[first : first + blocks, step : step + depth * STEPS, :, :], w_tile)
            multiply_stage(x_tile, w_tile, s_tile, words, part, totals)

    @T.macro
    def stage_chunk(total, reference, staged, first):
        for i, n in T.Parallel(block_m, chunk):
            staged[first + n, i] = T.cast(total[i, n] * reference[i], "bfloat16")

    @T.macro
    def stage_all(totals, references, staged, first):
        reference = T.alloc_fragment((block_m,), "float32")
        for i in T.Parallel(block_m):
            reference[i] = references[first * BLOCK + i]
        for c, total in enumerate(totals):
            stage_chunk(total, reference, staged, c * chunk)

    @T.macro
    def run(x, scales, weights, references, offsets, index, slot, finish, outputs):
        T.annotate_producer_reg_dealloc(24)
        T.annotate_consumer_reg_alloc(CONSUMER_REGISTERS[blocks])
        totals = [T.alloc_fragment((block_m, chunk), "float32") for _ in range(tile.chunks)]
        found = T.alloc_shared((2,), "int32")
        find_expert(offsets, num_offsets - 1, slot, found, block_n)
        expert = found[0]
        first_row = offsets[expert] + found[1] * block_n
        count = T.min(offsets[expert + 1] - first_row, block_n)
        first = expert * row_blocks + index * blocks
        sum_all(x, scales, weights, totals, first, first_row, count)
        staged = T.alloc_shared((block_n, block_m + 8), "bfloat16")
        stage_all(totals, references, staged, first)
        finish(staged, outputs, first_row, count, index)

    @T.macro
    def finish_plain(staged, outputs, first_row, count, index):
        for n, i in T.Parallel(block_n, block_m):
            if n < count and index * block_m + i < columns:
                outputs[0][first_row + n, index * block_m + i] = staged[n, i]

    @T.macro
    def finish_gated(staged, outputs, first_row, count, index):
        out, out_scales, factors, limit = outputs
        first_column = index * (block_m // 2)
        store_activated(
            staged, out, out_scales, factors, limit, first_row, count, first_column, columns // 2, threads
        )

    if not is_gated:

        @T.prim_func
        def program(
            x: T.Tensor((m, width), "float8_e4m3fn"),
            scales: T.Tensor((units, padded), "float32"),
            weights: T.Tensor((num_blocks, steps, 17, 32), "uint32"),
            references: T.Tensor((num_blocks * BLOCK,), "float32"),
            offsets: T.Tensor((num_offsets,), "int32"),
            out: T.Tensor((m, columns), "bfloat16"),
        ):
            with T.Kernel(tiles, m // block_n + num_offsets - 1, threads=threads) as (index, slot):
                run(x, scales, weights, references, offsets, index, slot, finish_plain, (out,))

    else:

        @T.prim_func
        def program(
            x: T.Tensor((m, width), "float8_e4m3fn"),
            scales: T.Tensor((units, padded), "float32"),
            weights: T.Tensor((num_blocks, steps, 17, 32), "uint32"),
            references: T.Tensor((num_blocks * BLOCK,), "float32"),
            offsets: T.Tensor((num_offsets,), "int32"),
            factors: T.Tensor((m,), "float32"),
            out: T.Tensor((m, columns // 2), "float8_e4m3fn"),
            out_scales: T.Tensor((T.ceildiv(columns // 2, UNIT), padded), "float32"),
            limit: T.float32,
        ):
            with T.Kernel(tiles, m // block_n + num_offsets - 1, threads=threads) as (index, slot):
                outputs = out, out_scales, factors, limit
                run(x, scales, weights, references, offsets, index, slot, finish_gated, outputs)

    return program.with_attr("global_symbol", name)
