"""Programs of the matrix products: packed weights times rows of activations, on tensor cores.

Every product has the same shape on the device: the weights are the first operand (rows of the instruction),
the activations the second (its columns), so few rows of activations cost little:

    C[BM weight rows, BN activation rows] += W[BM, 64] x X[BN, 64]^T       for every block of 64 channels

Weights stay packed in memory and in shared memory; a thread decodes into the registers that the instruction
reads. All decoded values are exact in bfloat16, as are activations rounded to E4M3, hence a result differs
from a float32 product in nothing but the order of its sum. That order is: the 16 channels of an instruction,
instructions in ascending channel, segments of `width / num_splits` channels likewise. It is the same for
every tile size, so a row has the same bits in every batch.
"""

import tilelang.cuda.language as T

from tilelang_ops.common.cuda_numerics import (
    e4m3_code,
    e4m3_value,
    e8m0_inverse,
    e8m0_value,
    fp8_scale_byte,
    magnitude_bits,
)
from tilelang_ops.common.packing import BLOCK

EXPERT_BITS = 10  # fewer than 1024 experts on a device
WORDS = {"mxfp4": 17, "fp8": 33}  # rows of 32 words in a packed block: codes, then one row of scales
# Warp groups of a block beside the loading one -> registers of their threads: all that a processor has.
CONSUMER_REGISTERS = {3: 152, 4: 112, 5: 88}


def decode_mxfp4_pair(word, pair):
    """Two E2M1 codes of a packed word as bfloat16 bits of value * 2^-126; `pair` is a constant.

    A pair has sign and code at bits 15 and 8..6 of each half of the result. The four pairs of a word are
    stored shifted: by 6 and 2 to the right, by 4 to the left (rotated), and pair 3 with its mantissa at 14.
    """
    if pair == 3:
        return (word & T.uint32(0x81808180)) | ((word >> T.uint32(8)) & T.uint32(0x00400040))
    if pair == 2:
        word = (word >> T.uint32(4)) | (word << T.uint32(28))
    else:
        word = word << T.uint32(6 if pair == 0 else 2)
    return word & T.uint32(0x81C081C0)


def decode_fp8_pair(word, pair):
    """Two E4M3 codes of a packed word as bfloat16 bits of value * 2^-120; `pair` is a constant.

    Pair 0 has the high byte of each half, pair 1 the low byte.
    """
    if pair == 0:
        return (word & T.uint32(0x80008000)) | ((word >> T.uint32(4)) & T.uint32(0x07F007F0))
    return ((word << T.uint32(8)) & T.uint32(0x80008000)) | ((word << T.uint32(4)) & T.uint32(0x07F007F0))


# Added to a scale byte: the exponent field of 2^(byte - 127) times what the decoders left out.
EXPONENT = {"mxfp4": 126, "fp8": 120}


def times_power(bits, scale_byte, exponent):
    """Multiply a pair of bfloat16 by 2^(scale_byte + exponent - 127); exact."""
    power = scale_byte * T.uint32(0x00800080) + T.uint32(exponent * 0x00800080)
    product = T.mul2(T.reinterpret(bits, "bfloat16x2"), T.reinterpret(power, "bfloat16x2"))
    return T.reinterpret(product, "uint32")


def select(index, values):
    """`values[index]` of an index that every thread knows when loops are unrolled."""
    if len(values) == 1:
        return values[0]
    half = len(values) // 2
    return T.if_then_else(index < half, select(index, values[:half]), select(index - half, values[half:]))


def decoded_pair(fmt, packed, at, i, j):
    """bfloat16 bits of weights (row i, channels 2j and 2j + 1) of packed blocks in shared memory.

    Args:
        fmt: "mxfp4" or "fp8".
        packed: [row blocks, steps, WORDS[fmt], 32] uint32.
        at: step in `packed`.
        i: weight row in the tile.
        j: pair of channels, 0..31.
    """
    block, warp, high, lane_row = i // 64, (i % 64) // 16, (i // 8) % 2, i % 8
    step, right, lane = j // 8, (j // 4) % 2, (i % 8) * 4 + j % 4
    if fmt == "mxfp4":
        word = packed[block, at, step * 4 + warp, lane]
        bits = select(right * 2 + high, [decode_mxfp4_pair(word, pair) for pair in range(4)])
        scales = packed[block, at, 16, warp * 8 + lane_row]
        scale = (scales >> T.cast((step // 2) * 16 + high * 8, "uint32")) & T.uint32(255)
    else:
        word = packed[block, at, (step * 2 + right) * 4 + warp, lane]
        bits = select(high, [decode_fp8_pair(word, pair) for pair in range(2)])
        scales = packed[block, at, 32, 0]
        scale = (scales >> T.cast((step // 2) * 16 + (warp // 2) * 8, "uint32")) & T.uint32(255)
    return times_power(bits, scale, EXPONENT[fmt])


def matrix_program(
    *,
    name,
    fmt,
    columns,
    width,
    result,
    block_m,
    block_n,
    stages,
    blocks_per_sm=1,
    depth=1,
    is_overlapped=False,
    granule=BLOCK,
    num_groups=1,
    is_grouped=False,
    is_gated=False,
    round_output=False,
    num_splits=1,
    in_turn=True,
    pieces=None,
    by_expert=False,
    arch="sm_90a",
):
    """The program of one product.

    Args:
        name: of the program.
        fmt: of the weights: "mxfp4", "fp8" or "bfloat16".
        columns: rows of the weights of a group or an expert, gate and up rows together.
        width: channels summed over.
        result: dtype of the output.
        block_m, block_n: weight rows and activation rows of a tile; they change no bits.
        stages: of the pipeline.
        depth: steps of a stage, on SM90: more of them need fewer barriers.
        is_overlapped: products run beside the next decoding, on SM90; needs an even depth and registers.
        granule: channels decoded at once then, 64 or 32; 32 needs fewer registers.
        blocks_per_sm: above 1, registers stay as they are at launch, so that several blocks fit.
        num_groups: column groups of the activations, each with its own weights.
        is_grouped: rows are sorted by expert and each expert has its own weights.
        is_gated: the output is `silu(min(g, limit)) * clamp(u, -limit, limit) * factor`.
        round_output: round the gated output to E4M3 in groups of 32.
        num_splits: segments of the channels, summed in order.
        in_turn: a block sums all segments; otherwise `out` is [num_splits, m, columns] float32.
        pieces: activation rows of the two parts of a tile, together `block_n`. The second is not multiplied
            where a group's rows end before it. For overlapped products of one segment, on SM90.
        by_expert: an expert's tiles come one after the other and read its weights together.
    """
    m, num_offsets = T.dynamic("m"), T.dynamic("num_offsets")
    is_packed = fmt != "bfloat16"
    row_blocks = -(-columns // BLOCK)
    steps = -(-width // BLOCK)
    tiles = -(-row_blocks * BLOCK // block_m)  # of one group or expert
    blocks = block_m // BLOCK
    words = WORDS.get(fmt, 0)
    row_blocks_of_all = T.dynamic("row_blocks") if is_grouped else num_groups * row_blocks
    on_tmem = arch == "sm_100a"
    threads = 256 if on_tmem else 128 * blocks
    segment_steps = steps // num_splits
    num_passes = num_splits if in_turn else 1
    num_steps = segment_steps * num_passes
    depth = 1 if on_tmem else depth
    granule = BLOCK if on_tmem else granule
    pieces = (block_n,) if on_tmem or pieces is None else pieces
    starts = [sum(pieces[:piece]) for piece in range(len(pieces))]
    assert sum(pieces) == block_n and len(pieces) <= 2, f"{pieces=} {block_n=}"
    assert len(pieces) == 1 or (is_overlapped and num_splits == 1), f"{pieces=} {num_splits=}"
    parts = depth * BLOCK // granule
    num_turns = -(-num_steps // depth)  # beyond the last channel both tiles are zero
    assert segment_steps % depth == 0 or num_splits == num_groups == 1, f"{segment_steps=} {depth=}"
    weight_shape = (row_blocks_of_all, steps, words, 32) if is_packed else (num_groups * columns, width)
    weight_type = "uint32" if is_packed else "bfloat16"
    out_columns = columns // 2 if is_gated else columns
    assert steps % num_splits == 0, f"{steps=} {num_splits=}"
    assert num_groups == 1 or columns % block_m == 0, f"{columns=} {block_m=}"

    is_shared = on_tmem or blocks_per_sm > 1 or blocks != 2

    @T.macro
    def share_registers():
        if on_tmem:  # finding the expert takes more than TileLang's 24
            T.annotate_producer_reg_dealloc(40)
            T.annotate_consumer_reg_alloc(224)
        elif blocks_per_sm > 1 or blocks not in CONSUMER_REGISTERS:
            T.no_set_max_nreg()
            T.annotate_min_blocks_per_sm(blocks_per_sm)
        else:
            T.annotate_producer_reg_dealloc(24)
            T.annotate_consumer_reg_alloc(CONSUMER_REGISTERS[blocks])

    @T.macro
    def load(x, weights, x_tile, w_tile, copy, index, first_row, step):
        T.copy(x[first_row, (copy * width if num_groups > 1 else 0) + step * BLOCK], x_tile)
        if is_packed:
            first = copy * row_blocks + index * blocks
            T.copy(weights[first : first + blocks, step : step + depth, :, :], w_tile)
        else:
            T.copy(weights[copy * columns + index * block_m, step * BLOCK], w_tile)

    @T.macro
    def multiply(operand, x_tile, sum_of):
        T.gemm(operand, x_tile, sum_of, transpose_B=True, policy=T.GemmWarpPolicy.FullRow)

    @T.macro
    def multiply_on(operand, x_tile, sum_of):
        T.wgmma_gemm(operand, x_tile, sum_of, transpose_B=True, policy=T.GemmWarpPolicy.FullRow)

    @T.macro
    def decode(pairs, w_tile, at):
        for i, j in T.Parallel(block_m, granule // 2):
            if granule == BLOCK:
                pairs[i, j] = decoded_pair(fmt, w_tile, at, i, j)
            else:
                pairs[i, j] = decoded_pair(fmt, w_tile, at // 2, i, j + at % 2 * 16)

    @T.macro
    def clear_sum(sums):
        T.clear(sums)

    def clear_sums(sums):
        for piece_sum in sums:
            clear_sum(piece_sum)

    def multiply_pieces(operand, x_tile, sums, first, used):
        """Products of the first pieces of a tile; each is a group of its own to `wait_wgmma`."""
        for start, rows, piece_sum in zip(starts[:used], pieces, sums, strict=False):
            multiply_on(operand, x_tile[start : start + rows, first : first + granule], piece_sum)

    @T.macro
    def advance(x_tile, w_tile, pairs, decoded, odd_pairs, odd_decoded, sums, used):
        # The waits are for the products that read a fragment last, and keep its decoding behind the issue of
        # the others.
        for at in T.unroll(0, parts, 2):
            if at > 0:
                T.wait_wgmma(used)
            decode(pairs, w_tile, at)
            multiply_pieces(decoded, x_tile, sums, at * granule, used)
            T.wait_wgmma(used)
            decode(odd_pairs, w_tile, at + 1)
            multiply_pieces(odd_decoded, x_tile, sums, at * granule + granule, used)
            if at + 2 == parts:  # inside the loop: a stage is given back behind it
                T.wait_wgmma(0)

    @T.macro
    def sum_rows(x, weights, totals, copy, index, first_row, count, segment):
        x_tile = T.alloc_shared((block_n, depth * BLOCK), "bfloat16")
        if is_packed:
            w_tile = T.alloc_shared((blocks, depth, words, 32), "uint32")
            pairs = T.alloc_fragment((block_m, granule // 2), "uint32")
            decoded = T.view(pairs, (block_m, granule), "bfloat16")
            T.clear(decoded)
            if is_overlapped:
                odd_pairs = T.alloc_fragment((block_m, granule // 2), "uint32")
                odd_decoded = T.view(odd_pairs, (block_m, granule), "bfloat16")
                T.clear(odd_decoded)
        else:
            w_tile = T.alloc_shared((block_m, depth * BLOCK), "bfloat16")
        clear_sums(totals)
        if num_passes > 1:
            part = T.alloc_fragment((block_m, block_n), "float32")
            T.clear(part)
        first_step = segment * segment_steps
        for turn in T.Pipelined(T.if_then_else(count > 0, num_turns, 0), num_stages=stages):
            load(x, weights, x_tile, w_tile, copy, index, first_row, first_step + turn * depth)
            sums = [part] if num_passes > 1 else totals
            if is_packed:
                if not is_overlapped:
                    for at in T.unroll(depth):
                        decode(pairs, w_tile, at)
                        multiply(decoded, x_tile[:, at * BLOCK : at * BLOCK + BLOCK], sums[0])
                elif len(pieces) == 1:
                    advance(x_tile, w_tile, pairs, decoded, odd_pairs, odd_decoded, sums, 1)
                elif count > starts[1]:
                    advance(x_tile, w_tile, pairs, decoded, odd_pairs, odd_decoded, sums, 2)
                else:
                    advance(x_tile, w_tile, pairs, decoded, odd_pairs, odd_decoded, sums, 1)
            else:
                multiply(w_tile, x_tile, sums[0])
            if num_passes > 1:  # noqa: SIM102  known when traced
                if (turn + 1) % (segment_steps // depth) == 0:
                    for i, n in T.Parallel(block_m, block_n):
                        totals[0][i, n] = totals[0][i, n] + part[i, n]
                    T.clear(part)

    @T.macro
    def sum_rows_on_tmem(x, weights, totals, copy, index, first_row, count, segment):
        x_tile = T.alloc_shared((block_n, BLOCK), "bfloat16")
        accumulator = T.alloc_tmem((block_m, block_n), "float32")
        done = T.alloc_barrier(1)
        if is_packed:
            w_tile = T.alloc_shared((blocks, 1, words, 32), "uint32")
            decoded = T.alloc_shared((block_m, BLOCK), "bfloat16")
            pairs = T.view(decoded, (block_m, BLOCK // 2), "uint32")
        else:
            w_tile = T.alloc_shared((block_m, BLOCK), "bfloat16")
        if num_passes > 1:
            part = T.alloc_fragment((block_m, block_n), "float32")
            T.clear(totals[0])
        first_step = segment * segment_steps
        for step in T.Pipelined(T.if_then_else(count > 0, num_steps, 0), num_stages=stages):
            load(x, weights, x_tile, w_tile, copy, index, first_row, first_step + step)
            if is_packed:
                decode(pairs, w_tile, 0)
            operand = decoded if is_packed else w_tile
            is_first = step % segment_steps == 0
            T.gemm(operand, x_tile, accumulator, transpose_B=True, mbar=done, clear_accum=is_first)
            if num_passes > 1:  # noqa: SIM102  known when traced
                if (step + 1) % segment_steps == 0:
                    T.copy(accumulator, part)
                    for i, n in T.Parallel(block_m, block_n):
                        totals[0][i, n] = totals[0][i, n] + part[i, n]
        if num_passes == 1:
            if count > 0:
                T.copy(accumulator, totals[0])
            else:
                T.clear(totals[0])

    sum_all = sum_rows_on_tmem if on_tmem else sum_rows

    @T.macro
    def stage_sum(piece_sum, staged, start, rows):
        for i, n in T.Parallel(block_m, rows):
            staged[start + n, i] = T.cast(piece_sum[i, n], staged.dtype)

    def stage_sums(totals, staged):
        for start, rows, piece_sum in zip(starts, pieces, totals, strict=True):
            stage_sum(piece_sum, staged, start, rows)

    @T.macro
    def store(totals, out, copy, index, first_row, count):
        if result == "float32":
            for n, i in T.Parallel(block_n, block_m):
                if n < count and index * block_m + i < columns:
                    out[first_row + n, copy * columns + index * block_m + i] = totals[0][i, n]
        else:
            staged = T.alloc_shared((block_n, block_m + 8), result)
            stage_sums(totals, staged)
            for n, i in T.Parallel(block_n, block_m):
                if n < count and index * block_m + i < columns:
                    out[first_row + n, copy * columns + index * block_m + i] = staged[n, i]

    def silu(gate):
        """Errs far less than the rounding behind it. The branches of a true division take a tenth of a tile's
        time."""
        return gate * T.fast_rcp(1.0 + T.__exp(-gate))

    @T.macro
    def store_gated(totals, out, index, first_row, count, factors, limit):
        staged = T.alloc_shared((block_n, block_m + 8), "bfloat16")
        groups = block_n * blocks
        values = T.alloc_fragment((groups, 32), "float32")
        magnitudes = T.alloc_fragment((groups, 32), "int32")
        largest = T.alloc_fragment((groups,), "int32")
        stage_sums(totals, staged)
        for g, i in T.Parallel(groups, 32):
            n, block = g // blocks, g % blocks
            gate = T.min(T.cast(staged[n, block * 64 + i], "float32"), limit)
            up = T.max(T.min(T.cast(staged[n, block * 64 + 32 + i], "float32"), limit), -limit)
            factor = T.if_then_else(n < count, factors[first_row + n], 0.0)
            values[g, i] = T.cast(T.cast(silu(gate) * up * factor, "bfloat16"), "float32")
        if round_output:
            for g, i in T.Parallel(groups, 32):
                magnitudes[g, i] = magnitude_bits(values[g, i])
            T.reduce_max(magnitudes, largest, dim=1)
            for g, i in T.Parallel(groups, 32):
                byte = fp8_scale_byte(largest[g])
                code = e4m3_code(values[g, i] * e8m0_inverse(byte))
                values[g, i] = e4m3_value(code) * e8m0_value(byte)
        for g, i in T.Parallel(groups, 32):
            n, column = g // blocks, (index * blocks + g % blocks) * 32 + i
            if n < count and column < out_columns:
                out[first_row + n, column] = T.cast(values[g, i], result)

    def tiles_before(slot, expert, num_experts):
        """Tiles of experts that begin before a slot, if it is this expert's."""
        return slot - (expert if by_expert else num_experts)

    @T.macro
    def bisect(expert, offsets, num_experts, slot):
        expert[0] = 0
        for bit in T.unroll(EXPERT_BITS):
            candidate = expert[0] + (1 << (EXPERT_BITS - 1 - bit))
            if candidate < num_experts:  # noqa: SIM102  guards the load
                if offsets[candidate] // block_n <= tiles_before(slot, candidate, num_experts):
                    expert[0] = candidate

    @T.macro
    def find_expert(offsets, num_experts, slot, found):
        """The expert of a slot, and its tile there.

        By expert, the slots of expert e begin at e + offsets[e] // block_n. Otherwise slot e has the first
        rows of expert e; the others follow, those of expert e from num_experts + offsets[e] // block_n on. So
        slots without rows come last and delay none.
        What is found goes through shared memory: producers and consumers would each have a copy of a thread's
        own memory.
        """
        expert = T.alloc_local((1,), "int32")
        tile = T.alloc_local((1,), "int32")
        expert[0] = slot
        tile[0] = 0
        if by_expert:
            bisect(expert, offsets, num_experts, slot)
            tile[0] = slot - expert[0] - offsets[expert[0]] // block_n
        elif slot >= num_experts:
            bisect(expert, offsets, num_experts, slot)
            tile[0] = slot - num_experts - offsets[expert[0]] // block_n + 1
        found[0] = expert[0]
        found[1] = tile[0]

    if not is_grouped:
        out_rows = m if in_turn else num_splits * m

        @T.prim_func
        def program(
            x: T.Tensor((m, num_groups * width), "bfloat16"),
            weights: T.Tensor(weight_shape, weight_type),
            out: T.Tensor((out_rows, num_groups * columns), result),
        ):
            with T.Kernel(
                num_groups * tiles, T.ceildiv(m, block_n), 1 if in_turn else num_splits, threads=threads
            ) as (tile, row_tile, segment):
                if is_shared:
                    share_registers()
                totals = [T.alloc_fragment((block_m, block_n), "float32")]
                copy, index, first_row = tile // tiles, tile % tiles, row_tile * block_n
                sum_all(x, weights, totals, copy, index, first_row, m - first_row, segment)
                store(totals, out, copy, index, segment * m + first_row, m - first_row)

    elif not is_gated:

        @T.prim_func
        def program(
            x: T.Tensor((m, width), "bfloat16"),
            weights: T.Tensor(weight_shape, weight_type),
            offsets: T.Tensor((num_offsets,), "int32"),
            out: T.Tensor((m, columns), result),
        ):
            with T.Kernel(tiles, m // block_n + num_offsets - 1, threads=threads) as (index, slot):
                if is_shared:
                    share_registers()
                totals = [T.alloc_fragment((block_m, rows), "float32") for rows in pieces]
                found = T.alloc_shared((2,), "int32")
                find_expert(offsets, num_offsets - 1, slot, found)
                expert = found[0]
                first_row = offsets[expert] + found[1] * block_n
                count = offsets[expert + 1] - first_row
                sum_all(x, weights, totals, expert, index, first_row, count, 0)
                store(totals, out, 0, index, first_row, count)

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
            with T.Kernel(tiles, m // block_n + num_offsets - 1, threads=threads) as (index, slot):
                if is_shared:
                    share_registers()
                totals = [T.alloc_fragment((block_m, rows), "float32") for rows in pieces]
                found = T.alloc_shared((2,), "int32")
                find_expert(offsets, num_offsets - 1, slot, found)
                expert = found[0]
                first_row = offsets[expert] + found[1] * block_n
                count = offsets[expert + 1] - first_row
                sum_all(x, weights, totals, expert, index, first_row, count, 0)
                store_gated(totals, out, index, first_row, count, factors, limit)

    return program.with_attr("global_symbol", name)
