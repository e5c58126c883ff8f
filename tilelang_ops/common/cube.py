"""Programs of the matrix products for Ascend 950: cube cores multiply, vector cores unpack and activate.

A cube core and its two vector cores take tiles of the output in turns, activation rows by weight rows:

    activations                  ----------------> L1 ---+
                                                         +--> L0C, float32 --> (activation) --> output
    weights, packed --> vector cores --> bfloat16, L1 ---+

Each vector core unpacks one block of 64 weight rows of a tile, and activates half of its activation rows.
Unpacked weights are exact in bfloat16, their products in float32; sums are in the cube core's order, over
channels in ascending steps of one length. Tiles have one size: what else a batch holds changes no row's sums.

These programs are lowered to AscendC source in the tests and emulated; none has run on a device.
"""

import tilelang.ascend.language as T

from tilelang_ops.common.cuda_numerics import (
    e4m3_code,
    e4m3_value,
    e8m0_inverse,
    e8m0_value,
    fp8_scale_byte,
    magnitude_bits,
)
from tilelang_ops.common.packing import BLOCK

CUBE_CORES = 32  # length of the grid; a device with fewer queues the rest
ROWS = 128  # activation rows of a tile
COLUMNS = 128  # weight rows of a tile: a packed block for each vector core
STEP = 256  # channels of a step
DEPTH = STEP // BLOCK
HALF = ROWS // 2  # activation rows of a vector core
GROUP = 32  # channels of an FP8 group, and rows of a gate's block
THREADS = 512  # SIMT threads of a vector core
EXPERT_BITS = 10  # fewer than 1024 experts on a device
WORDS = {"mxfp4": 17, "fp8": 33}  # rows of 32 words in a packed block: codes, then one row of scales


def mxfp4_code(word, pair, element):
    """E2M1 code of a packed word (`common/packing.py`): `pair` is row + 2 * right, `element` the channel."""
    low, high = word & T.uint32(0xFFFF), word >> T.uint32(16)
    half, other = (low, high) if element == 0 else (high, low)
    if pair == 0:
        return ((half >> T.uint32(6)) & T.uint32(8)) | (half & T.uint32(7))
    if pair == 1:
        return ((half >> T.uint32(10)) & T.uint32(8)) | ((half >> T.uint32(4)) & T.uint32(7))
    if pair == 2:
        return (other & T.uint32(8)) | ((half >> T.uint32(10)) & T.uint32(7))
    rest = ((half >> T.uint32(6)) & T.uint32(6)) | ((half >> T.uint32(14)) & T.uint32(1))
    return ((half >> T.uint32(12)) & T.uint32(8)) | rest


def e2m1_in_e4m3(code):
    """uint8 E4M3 code of an E2M1 value * 2^-6, which is exact; no float is subnormal on the way."""
    return T.cast(((code & T.uint32(8)) << T.uint32(4)) | ((code & T.uint32(7)) << T.uint32(2)), "uint8")


def quotient(a, b):
    """a // b of int32 that are not negative, of which the compiler knows nothing."""
    return T.cast(T.cast(a, "uint32") // T.cast(b, "uint32"), "int32")


def remainder(a, b):
    """a % b likewise."""
    return T.cast(T.cast(a, "uint32") % T.cast(b, "uint32"), "int32")


def scale_value(byte):
    """Float32 of the E8M0 byte in the low bits of a uint32."""
    return e8m0_value(T.cast(byte & T.uint32(255), "int32"))


@T.macro
def unpack_mxfp4(weights, block, step, steps, target, column):
    """A block of 64 x 64 as bfloat16 at target[:, column], ...; zeros from the last step on."""
    for t in T.Parallel(4 * 128):
        quarter, warp, lane = t // 128, t % 128 // 32, t % 32
        word = T.alloc_var("uint32", T.uint32(0))
        scales = T.alloc_var("uint32", T.uint32(0))
        if step < steps:
            word = weights[block, step, quarter * 4 + warp, lane]
            scales = weights[block, step, 16, warp * 8 + lane // 4] >> T.cast(quarter // 2 * 16, "uint32")
        for pair in (0, 1, 2, 3):
            row = warp * 16 + lane // 4 + pair % 2 * 8
            scale = T.alloc_var("float32", scale_value(scales >> T.uint32(pair % 2 * 8)) * T.float32(2.0**6))
            for element in (0, 1):
                channel = quarter * 16 + pair // 2 * 8 + lane % 4 * 2 + element
                value = e4m3_value(e2m1_in_e4m3(mxfp4_code(word, pair, element))) * scale
                target[row, column + channel] = T.cast(value, "bfloat16")


@T.macro
def unpack_fp8(weights, block, step, steps, target, column):
    """The same of FP8."""
    for t in T.Parallel(8 * 128):
        eighth, warp, lane = t // 128, t % 128 // 32, t % 32
        word = T.alloc_var("uint32", T.uint32(0))
        scale = T.alloc_var("float32", 0.0)
        if step < steps:
            word = weights[block, step, eighth * 4 + warp, lane]
            scale = scale_value(
                weights[block, step, 32, 0] >> T.cast(eighth // 4 * 16 + warp // 2 * 8, "uint32")
            )
        for high in (0, 1):
            row = warp * 16 + lane // 4 + high * 8
            for element in (0, 1):
                channel = eighth * 8 + lane % 4 * 2 + element
                code = T.cast((word >> T.uint32(16 * element + 8 * (1 - high))) & T.uint32(255), "uint8")
                target[row, column + channel] = T.cast(e4m3_value(code) * scale, "bfloat16")


UNPACK = {"mxfp4": unpack_mxfp4, "fp8": unpack_fp8}


@T.macro
def find_expert(offsets, num_experts, slot):
    """The expert of a slot: e has slots from offsets[e] // ROWS + e on, enough for its rows."""
    expert = T.alloc_var("int32", 0)
    for bit in T.serial(EXPERT_BITS):
        candidate = expert + (1 << (EXPERT_BITS - 1 - bit))
        if candidate < num_experts:  # noqa: SIM102  guards the load
            if offsets[candidate] // ROWS + candidate <= slot:
                expert = candidate
    return expert


def cube_program(
    *,
    name,
    fmt,
    columns,
    width,
    result,
    num_groups=1,
    is_grouped=False,
    is_gated=False,
    round_output=False,
):
    """The program of one product; arguments as in `common/matrix.py`, where they are not those of the device.

    Args:
        name: of the program.
        fmt: of the weights: "mxfp4", "fp8" or "bfloat16".
        columns: rows of the weights of a group or an expert, gate and up rows together.
        width: channels summed over.
        result: dtype of the output.
        num_groups: column groups of the activations, each with its own weights.
        is_grouped: rows are sorted by expert and each expert has its own weights.
        is_gated: the output is `silu(min(g, limit)) * clamp(u, -limit, limit) * factor`.
        round_output: round the gated output to E4M3 in groups of 32.
    """
    m, num_offsets = T.dynamic("m"), T.dynamic("num_offsets")
    is_packed = fmt != "bfloat16"
    row_blocks, steps = -(-columns // BLOCK), -(-width // BLOCK)
    tiles, turns = -(-columns // COLUMNS), -(-width // STEP)
    out_columns = columns // 2 if is_gated else columns
    row_blocks_of_all = T.dynamic("row_blocks") if is_grouped else num_groups * row_blocks
    weight_shape = (row_blocks_of_all, steps, WORDS[fmt], 32) if is_packed else (num_groups * columns, width)
    weight_type = "uint32" if is_packed else "bfloat16"
    assert num_groups == 1 or (columns % COLUMNS == 0 and width % STEP == 0), f"{columns=} {width=}"
    assert width % 16 == 0 or not is_packed, f"{width=}"
    unpack = UNPACK.get(fmt)

    @T.macro
    def sum_tile(x, weights, buffers, copy, index, first_row, sid):
        x_tile, w_tile, unpacked, total = buffers
        for turn in T.Pipelined(turns, num_stages=2):
            channel = (0 if is_grouped else copy * width) + turn * STEP
            with T.Stage(0):
                T.copy(x[first_row : first_row + ROWS, channel : channel + STEP], x_tile)
            if is_packed:
                # Behind the last block of an odd number the second core unpacks the last again, for nothing.
                block = copy * row_blocks + T.min(index * 2 + sid, row_blocks - 1)
                with T.SimtVF(threads=THREADS):
                    for at in range(DEPTH):
                        unpack(weights, block, turn * DEPTH + at, steps, unpacked, at * BLOCK)
                T.copy(unpacked, w_tile[sid * BLOCK : sid * BLOCK + BLOCK, :])
            else:
                first = copy * columns + index * COLUMNS
                T.copy(weights[first : first + COLUMNS, turn * STEP : turn * STEP + STEP], w_tile)
            T.gemm(x_tile, w_tile, total, transpose_B=True, clear_accum=turn == 0)

    @T.macro
    def activate(total, parts, acts, scales, factors, limit, out, index, first_row, count, sid):
        """Activates half of a tile's rows, and stores them."""
        T.dual_copy(total, parts)
        with T.SimtVF(threads=THREADS):
            for r, c in T.Parallel(HALF, COLUMNS // 2):
                row = sid * HALF + r
                gate = _rounded(parts[r, c // GROUP * (2 * GROUP) + c % GROUP])
                up = _rounded(parts[r, c // GROUP * (2 * GROUP) + GROUP + c % GROUP])
                gate = T.min(gate, limit)
                value = gate / (T.float32(1.0) + T.exp(-gate)) * T.max(T.min(up, limit), -limit)
                factor = T.if_then_else(
                    row < count, factors[first_row + T.min(row, count - 1)], T.float32(0.0)
                )
                acts[r, c] = _rounded(value * factor)
            if round_output:
                for r, g in T.Parallel(HALF, COLUMNS // 2 // GROUP):
                    largest = T.alloc_var("int32", 0)
                    for i in T.serial(GROUP):
                        largest = T.max(largest, magnitude_bits(acts[r, g * GROUP + i]))
                    scales[r, g] = fp8_scale_byte(largest)
                for r, c in T.Parallel(HALF, COLUMNS // 2):
                    scale = scales[r, c // GROUP]
                    code = e4m3_code(acts[r, c] * e8m0_inverse(scale))
                    acts[r, c] = e4m3_value(code) * e8m0_value(scale)
            for r, c in T.Parallel(HALF, COLUMNS // 2):
                row, column = sid * HALF + r, index * (COLUMNS // 2) + c
                if row < count and column < out_columns:
                    out[first_row + row, column] = T.cast(acts[r, c], "bfloat16")

    if not is_grouped:

        @T.prim_func
        def program(
            x: T.Tensor((m, num_groups * width), "bfloat16"),
            weights: T.Tensor(weight_shape, weight_type),
            out: T.Tensor((m, num_groups * columns), result),
        ):
            with T.MixedKernel(CUBE_CORES) as (core, sid):
                x_tile = T.alloc_l1((ROWS, STEP), "bfloat16")
                w_tile = T.alloc_l1((COLUMNS, STEP), "bfloat16")
                unpacked = T.alloc_shared((BLOCK, STEP), "bfloat16")
                total = T.alloc_l0c((ROWS, COLUMNS), "float32")
                T.annotate_buffer_versions({x_tile: 2, w_tile: 2})
                for turn in T.serial(T.ceildiv(T.ceildiv(m, ROWS) * num_groups * tiles - core, CUBE_CORES)):
                    tile = turn * CUBE_CORES + core
                    copy, index = tile // tiles % num_groups, tile % tiles
                    first_row = tile // (tiles * num_groups) * ROWS
                    sum_tile(x, weights, (x_tile, w_tile, unpacked, total), copy, index, first_row, sid)
                    column = copy * columns + index * COLUMNS
                    T.copy(total, out[first_row : first_row + ROWS, column : column + COLUMNS])

    elif not is_gated:

        @T.prim_func
        def program(
            x: T.Tensor((m, width), "bfloat16"),
            weights: T.Tensor(weight_shape, weight_type),
            offsets: T.Tensor((num_offsets,), "int32"),
            out: T.Tensor((m, columns), result),
        ):
            with T.MixedKernel(CUBE_CORES) as (core, sid):
                x_tile = T.alloc_l1((ROWS, STEP), "bfloat16")
                w_tile = T.alloc_l1((COLUMNS, STEP), "bfloat16")
                unpacked = T.alloc_shared((BLOCK, STEP), "bfloat16")
                total = T.alloc_l0c((ROWS, COLUMNS), "float32")
                T.annotate_buffer_versions({x_tile: 2, w_tile: 2})
                num_tiles = (m // ROWS + num_offsets - 1) * tiles
                for turn in T.serial(T.ceildiv(num_tiles - core, CUBE_CORES)):
                    tile = turn * CUBE_CORES + core
                    slot, index = tile // tiles, tile % tiles
                    expert = find_expert(offsets, num_offsets - 1, slot)
                    start = offsets[expert]
                    first_row = T.alloc_var("int32", start + (slot - expert - start // ROWS) * ROWS)
                    count = T.alloc_var("int32", T.min(offsets[expert + 1] - first_row, ROWS))
                    if count > 0:
                        sum_tile(x, weights, (x_tile, w_tile, unpacked, total), expert, index, first_row, sid)
                        column = index * COLUMNS
                        T.copy(
                            total[0:count, :],
                            out[first_row : first_row + count, column : column + COLUMNS],
                        )

    else:

        @T.prim_func
        def program(
            x: T.Tensor((m, width), "bfloat16"),
            weights: T.Tensor(weight_shape, weight_type),
            offsets: T.Tensor((num_offsets,), "int32"),
            factors: T.Tensor((m,), "float32"),
            out: T.Tensor((m, out_columns), result),
            limit: T.float32,
        ):
            with T.MixedKernel(CUBE_CORES) as (core, sid):
                x_tile = T.alloc_l1((ROWS, STEP), "bfloat16")
                w_tile = T.alloc_l1((COLUMNS, STEP), "bfloat16")
                unpacked = T.alloc_shared((BLOCK, STEP), "bfloat16")
                total = T.alloc_l0c((ROWS, COLUMNS), "float32")
                T.annotate_buffer_versions({x_tile: 2, w_tile: 2})
                parts = T.alloc_shared((HALF, COLUMNS), "float32")
                acts = T.alloc_shared((HALF, COLUMNS // 2), "float32")
                scales = T.alloc_shared((HALF, COLUMNS // 2 // GROUP), "int32")
                num_tiles = (m // ROWS + num_offsets - 1) * tiles
                for turn in T.serial(T.ceildiv(num_tiles - core, CUBE_CORES)):
                    tile = turn * CUBE_CORES + core
                    slot, index = tile // tiles, tile % tiles
                    expert = find_expert(offsets, num_offsets - 1, slot)
                    start = offsets[expert]
                    first_row = T.alloc_var("int32", start + (slot - expert - start // ROWS) * ROWS)
                    count = T.alloc_var("int32", T.min(offsets[expert + 1] - first_row, ROWS))
                    if count > 0:
                        sum_tile(x, weights, (x_tile, w_tile, unpacked, total), expert, index, first_row, sid)
                        activate(
                            total, parts, acts, scales, factors, limit, out, index, first_row, count, sid
                        )

    return program.with_attr("global_symbol", name)


def _rounded(x):
    """Float32 of the nearest bfloat16."""
    return T.cast(T.cast(x, "bfloat16"), "float32")
