"""Products of FP8 rows with FP8 weights on tensor cores: codes are the operands, scales join behind.

A unit is 128 channels: four instructions of 32 sum its products into a temporary, which the threads then add
to the total, multiplied by both scales, powers of two:

    T[rows, columns]  = X[rows, 128] x W[columns, 128]^T            codes, E4M3
    S[rows, columns] += T * (x_scale[row] * w_scale[column / 32])   float32; the product is exact

The order of a row's sum is: the channels of an instruction as the tensor core sums them, instructions and
units in ascending channel, in segments of `width / num_splits` channels. It is the same for every tile, so a
row has the same bits in every batch.

Rows are the first operand, a warp group having 64 of them. Few rows are the second, for a tile then has
as many as there are.
"""

from math import gcd

import tilelang.cuda.language as T

from tilelang_ops.common.matrix_tiles import FEW_ROWS, PROCESSORS
from tilelang_ops.common.row_codes import UNIT

WEIGHT_ROWS = 32  # that share a scale
SCALES = 32  # of a tile at least: a stage of the pipeline begins at a multiple of 128 bytes
ALIGNED = 4  # scales that a copy begins at a multiple of: 16 bytes
CONSUMER_REGISTERS = {1: 216, 2: 240, 3: 160}  # warp groups that multiply -> registers of their threads


def dense_program(
    *,
    name,
    columns,
    width,
    result,
    block_m,
    block_n,
    chunk,
    stages,
    depth=1,
    temps=1,
    swapped=False,
    blocks_per_sm=1,
    num_groups=1,
    num_splits=1,
    in_turn=True,
):
    """The program of a dense product.

    Args:
        name: of the program.
        columns: weight rows of a group of columns.
        width: channels summed over.
        result: dtype of the output.
        block_m, block_n: activation and weight rows of a tile.
        chunk: weight rows of an instruction; with `swapped` all of a warp group's.
        stages, depth: of the pipeline, and units of a stage.
        temps: products under way at once.
        swapped: weights are the first operand.
        blocks_per_sm: of a multiprocessor.
        num_groups: groups of channels of the activations, each with its own weights.
        num_splits: segments of the channels, summed in order.
        in_turn: a block sums all segments; otherwise `out` is [num_splits * m, columns] float32.
    """
    m, padded = T.dynamic("m"), T.dynamic("padded")
    units = -(-width // UNIT)
    segment_units, num_passes = units // num_splits, num_splits if in_turn else 1
    warp_groups = (block_n if swapped else block_m) // 64
    registers = CONSUMER_REGISTERS[warp_groups]
    tiles = -(-columns // block_n)  # of one group
    chunks = tuple(range(1 if swapped else block_n // chunk))
    shape = (block_n, block_m) if swapped else (block_m, chunk)  # of a product
    work = tuple((d, c) for d in range(depth) for c in chunks)
    scale_columns = -(-columns // UNIT) * (UNIT // WEIGHT_ROWS)
    eighths = block_n // 8  # a thread has two neighbours of eight columns
    gemm = T.gemm if temps == 1 else T.wgmma_gemm  # the first waits for its product
    assert units % num_splits == 0 and segment_units % depth == 0, f"{units=} {num_splits=} {depth=}"
    assert num_passes == 1 or len(chunks) == 1, f"{num_passes=} {chunk=} {block_n=}"
    assert num_groups == 1 or width % UNIT == 0, f"{width=} {num_groups=}"

    @T.macro
    def load_scales(x_scales, w_scales, s, w, unit, column):
        """Scales of a unit: x's by activation row, w's by weight row or by eight of them."""
        for i in T.Parallel(block_m):
            s[i] = x_scales[unit, i]
        if swapped:
            for i in T.Parallel(block_n):
                w[i] = w_scales[unit, (column + i) // WEIGHT_ROWS]
        else:
            for i in T.Parallel(eighths):
                w[i] = w_scales[unit, (column + 8 * i) // WEIGHT_ROWS]

    @T.macro
    def multiply(x_tile, w_tile, product, c):
        """Replace `product`; it is under way behind this where several may be."""
        how = {"transpose_B": True, "policy": T.GemmWarpPolicy.FullRow, "clear_accum": True}
        if swapped:
            gemm(w_tile, x_tile, product, **how)
        else:
            gemm(x_tile, w_tile[c * chunk : (c + 1) * chunk, :], product, **how)

    @T.macro
    def wait_for(product, pending):
        """Wait until at most `pending` products that began later are under way."""
        T.wait_wgmma(pending)
        T.warpgroup_fence_operand(product, num_regs=shape[0] * shape[1] // (128 * warp_groups))

    @T.macro
    def promote(total, product, s, w, c):
        for i, j in T.Parallel(*shape):
            if swapped:
                total[i, j] = total[i, j] + product[i, j] * (w[i] * s[j])
            else:
                total[i, j] = total[i, j] + product[i, j] * (s[i] * w[c * (chunk // 8) + j // 8])

    @T.macro
    def keep_until_here(x_tiles, w_tiles):
        """TileLang gives a stage back behind its last reader, which must not be a product under way."""
        read = T.alloc_local((1,), "uint8")
        for d in tuple(range(depth)):
            read[0] = T.reinterpret(x_tiles[d][0, 0], "uint8")
            read[0] = T.reinterpret(w_tiles[d][0, 0], "uint8")

    @T.macro
    def sum_stage(x_tiles, w_tiles, s, w, products, sums):
        """The products of a stage, each promoted while the next ones run."""
        for at in tuple(range(len(work) + temps - 1)):
            if at < len(work):
                d, c = work[at]
                multiply(x_tiles[d], w_tiles[d], products[at % temps], c)
            if at >= temps - 1:
                done = at - temps + 1
                if temps > 1:
                    wait_for(products[done % temps], min(temps, len(work) - done) - 1)
                if temps > 1 and done == len(work) - 1:
                    keep_until_here(x_tiles, w_tiles)
                d, c = work[done]
                promote(sums[c], products[done % temps], s[d], w[d], c)

    @T.prim_func
    def program(
        x: T.Tensor((m, num_groups * width), "float8_e4m3fn"),
        scales: T.Tensor((num_groups * units, padded), "float32"),
        weight: T.Tensor((num_groups * columns, width), "float8_e4m3fn"),
        weight_scales: T.Tensor((num_groups * units, scale_columns), "float32"),
        out: T.Tensor((m if in_turn else num_splits * m, num_groups * columns), result),
    ):
        with T.Kernel(
            T.ceildiv(m, block_m),
            num_groups * tiles,
            1 if in_turn else num_splits,
            threads=128 * warp_groups,
        ) as (row_tile, tile, segment):
            T.annotate_producer_reg_dealloc(24)
            T.annotate_consumer_reg_alloc(registers)
            if blocks_per_sm > 1:
                T.annotate_min_blocks_per_sm(blocks_per_sm)
            x_tiles = [T.alloc_shared((block_m, UNIT), "float8_e4m3fn") for _ in range(depth)]
            w_tiles = [T.alloc_shared((block_n, UNIT), "float8_e4m3fn") for _ in range(depth)]
            x_scales = T.alloc_shared((depth, max(block_m, SCALES)), "float32")
            w_scales = T.alloc_shared((depth, SCALES), "float32")
            s = [T.alloc_fragment((block_m,), "float32") for _ in range(depth)]
            w = [T.alloc_fragment((block_n if swapped else eighths,), "float32") for _ in range(depth)]
            totals = [T.alloc_fragment(shape, "float32") for _ in chunks]
            products = [T.alloc_fragment(shape, "float32") for _ in range(temps)]
            copy, index, first_row = tile // tiles, tile % tiles, row_tile * block_m
            first_scale = index * block_n // WEIGHT_ROWS // ALIGNED * ALIGNED
            column = index * block_n - first_scale * WEIGHT_ROWS
            for c in chunks:
                T.clear(totals[c])
            if num_passes > 1:
                part = T.alloc_fragment(shape, "float32")
                T.clear(part)
            for turn in T.Pipelined(segment_units * num_passes // depth, num_stages=stages):
                unit = segment * segment_units + turn * depth
                for d in tuple(range(depth)):
                    T.copy(x[first_row, copy * width + (unit + d) * UNIT], x_tiles[d])
                    T.copy(weight[copy * columns + index * block_n, (unit + d) * UNIT], w_tiles[d])
                T.copy(scales[copy * units + unit, first_row], x_scales)
                T.copy(weight_scales[copy * units + unit, first_scale], w_scales)
                for d in tuple(range(depth)):
                    load_scales(x_scales, w_scales, s[d], w[d], d, column)
                sum_stage(x_tiles, w_tiles, s, w, products, [part] if num_passes > 1 else totals)
                if num_passes > 1:  # noqa: SIM102  known when traced
                    if (turn + 1) * depth % segment_units == 0:
                        for i, j in T.Parallel(*shape):
                            totals[0][i, j] = totals[0][i, j] + part[i, j]
                        T.clear(part)
            for c in chunks:
                for i, j in T.Parallel(*shape):
                    row = first_row + (j if swapped else i)
                    weight_row = index * block_n + (i if swapped else c * chunk + j)
                    if row < m and weight_row < columns:
                        out[segment * m + row, copy * columns + weight_row] = T.cast(totals[c][i, j], result)

    return program.with_attr("global_symbol", name)


# Activation rows x weight rows -> sizes of `dense_program`, and time of a block on an H200, us: of a unit,
# and of its start and end.
TILES = {
    "32x64": {
        "block_m": 32,
        "block_n": 64,
        "chunk": 32,
        "swapped": True,
        "stages": 4,
        "depth": 4,
        "temps": 4,
    },
    "32x64 twice": {
        "block_m": 32,
        "block_n": 64,
        "chunk": 32,
        "swapped": True,
        "stages": 4,
        "depth": 2,
        "temps": 2,
        "blocks_per_sm": 2,
    },
    "64x64": {"block_m": 64, "block_n": 64, "chunk": 64, "stages": 3, "depth": 4, "temps": 2},
    "128x80": {"block_m": 128, "block_n": 80, "chunk": 80, "stages": 4, "depth": 2, "temps": 2},
    "128x128": {"block_m": 128, "block_n": 128, "chunk": 128, "stages": 3, "depth": 2, "temps": 2},
    "128x128 in turn": {"block_m": 128, "block_n": 128, "chunk": 128, "stages": 6, "depth": 1, "temps": 1},
    "128x256": {"block_m": 128, "block_n": 256, "chunk": 128, "stages": 4, "depth": 1, "temps": 1},
}
COSTS = {
    "64x64": (0.28, 2.0),
    "128x80": (0.41, 2.2),
    "128x128": (0.46, 2.9),
    "128x128 in turn": (0.55, 2.9),
    "128x256": (0.92, 4.5),
}
SUM_COST, SUM_RATE = 2.0, 3.0e6  # of adding segments up: us, and bytes of one of these


def sizes_of(tile: str, units: int) -> dict[str, int | bool]:
    """A tile's sizes for segments of so many units: a stage has a divisor of them."""
    sizes = dict(TILES[tile])
    depth = gcd(sizes["depth"], units)
    sizes["stages"] = sizes["stages"] * sizes["depth"] // depth
    products = depth * (1 if sizes.get("swapped") else sizes["block_n"] // sizes["chunk"])
    return {**sizes, "depth": depth, "temps": min(sizes["temps"], products)}


def tiles_for(num_splits: int, units: int) -> list[tuple[bool, str]]:
    """What `tile_of` chooses from: whether a block sums all segments, and a tile.

    Args:
        num_splits: segments.
        units: of a segment.
    """
    few = "32x64" if units % 4 == 0 else "32x64 twice"
    if num_splits == 1:
        return [(True, few), *((True, tile) for tile in ("64x64", "128x80", "128x128", "128x256"))]
    return [(True, "128x128 in turn"), (False, few), (False, "64x64"), (False, "128x80"), (False, "128x128")]


def tile_of(num_rows: int, columns: int, units: int, num_groups: int, num_splits: int) -> tuple[bool, str]:
    """The tile that takes the least time, by rounds of blocks over the processors; it decides no bits.

    Args:
        num_rows: of the batch.
        columns: weight rows of a group.
        units: of a segment.
        num_groups, num_splits: as in `dense_program`.
    """
    choices = tiles_for(num_splits, units)
    if num_rows <= FEW_ROWS:
        return next(choice for choice in choices if choice[1].startswith("32"))

    def cost(choice: tuple[bool, str]) -> float:
        in_turn, tile = choice
        of_unit, of_block = COSTS[tile]
        blocks = num_groups * -(-columns // TILES[tile]["block_n"]) * -(-num_rows // TILES[tile]["block_m"])
        if num_splits == 1 or in_turn:
            return -(-blocks // PROCESSORS) * (num_splits * units * of_unit + of_block)
        rounds = -(-blocks * num_splits // PROCESSORS)
        return (
            rounds * (units * of_unit + of_block) + SUM_COST + 8 * num_splits * num_rows * columns / SUM_RATE
        )

    return min((choice for choice in choices if choice[1] in COSTS), key=cost)
