"""sparse_attention on CUDA: a block of two warp groups for a row and 64 of its heads.

Blocks of 64 keys are unpacked to bfloat16 in shared memory, where they serve both products. While the first
group multiplies queries and keys and makes weights of the logits, the second unpacks most of the next block;
then both add weighted values, each to half of the channels:

    first group     Q K^T of block b, softmax                 | values += P V, unpack 1/4 of b + 1
    second group    unpack 3/4 of block b + 1                 | values += P V

Unpacked keys are the true ones / 128, exact in bfloat16: codes become floats whose exponent is off by a
constant, subnormals included, and a product with a power of two, or with an E4M3 scale, sets it right. (Exact
for E8M0 bytes 10 to 254 and every E4M3 scale; a NaN scale gives NaN. An E4M3 code of NaN under a number for a
scale, which nothing stores, would count as 480.)

    E4M3  s eeee mmm  ->  s 0000 eeee mmm 0000  =  value * 2^-120
    E2M1  s ee m      ->  s 000000 ee m 000000  =  value * 2^-126

Channels 0..7 lie in a tile as 0 4 1 5 2 6 3 7, which is how nibbles pair up in a word's halves; queries and
results are permuted likewise. Sums of a row follow the order of its list of keys whatever else runs.
"""

import torch
from tilelang.cuda import language as T
from torch import Tensor

from tilelang_ops.common.kernels import cuda_kernel
from tilelang_ops.common.records import flat_rows, rows_per_part

WIDTH = 512
WINDOW_BYTES, MAIN_BYTES = 528, 288
HEADS = 64  # of a block of threads
KEYS = 64  # multiplied together
LANES, WARPS = 32, 8
THREADS, GROUP = WARPS * LANES, WARPS // 2 * LANES
UNIT = 4  # keys that a warp unpacks at once
PER_ROUND = UNIT * WARPS // 2  # keys that a group unpacks at once
MAX_KEYS = 1024  # of a row in one pool
PER_THREAD = MAX_KEYS // THREADS
LINES = HEADS * WIDTH // 8 // THREADS  # runs of 8 channels of a thread
SHRUNK = 128.0  # true keys / unpacked ones
SLACK = 8.0  # a row's largest logit may lag behind by this power of two before sums are rescaled
FLOAT_WARPS, PER_LANE = 4, WIDTH // LANES  # of the kernel in float32
LOG2_E = 1.4426950408889634
NAN_PAIR = 0x7FC07FC0
ASYNC = {"wg_wait": -1}  # the product runs on until T.wait_wgmma


def _chunk(number):
    """Where a run of 8 channels lies in a tile's row: so that a warp's stores meet no bank twice."""
    return number ^ (number // 8 % 2)


@T.macro
def _load_index(numbers, index, row, width, tx):
    """This thread's part of a row's index, -1 beyond its end."""
    for j in T.unroll(PER_THREAD):
        numbers[j] = -1
        if j * THREADS + tx < width:
            numbers[j] = index[row, j * THREADS + tx]


@T.macro
def _list_records(numbers, width, records, stride, listed, pool, totals, found, tx):
    """Writes the rows of a pool that the threads' `numbers` name, in order, to listed[first], ...

    Copies of the last one fill up KEYS.
    """
    warp, lane = tx // LANES, tx % LANES
    bits = T.alloc_local((PER_THREAD,), "uint32")
    place = T.alloc_local((1,), "int32")
    for j in T.unroll(PER_THREAD):
        if j * THREADS < width:
            bits[j] = T.cast(T.ballot(numbers[j] >= 0), "uint32")
            if lane == 0:
                totals[pool, j * WARPS + warp] = T.popcount(bits[j])
    T.sync_threads()
    found[0] = 0
    for j in T.unroll(PER_THREAD):
        if j * THREADS < width:
            place[0] = pool * MAX_KEYS + found[0]
            for w in T.unroll(WARPS):
                if w < warp:
                    place[0] += totals[pool, j * WARPS + w]
                found[0] += totals[pool, j * WARPS + w]
            if numbers[j] >= 0:
                before = bits[j] & ((T.uint32(1) << T.cast(lane, "uint32")) - T.uint32(1))
                place[0] += T.popcount(before)
                listed[place[0]] = numbers[j] // records * stride + numbers[j] % records
    T.sync_threads()
    if found[0] > 0 and found[0] + tx < T.ceildiv(found[0], KEYS) * KEYS:
        listed[pool * MAX_KEYS + found[0] + tx] = listed[pool * MAX_KEYS + found[0] - 1]


@T.macro
def _fetch(raw, source, block, key, lane):
    """Loads this lane's 16 codes and their scale of the keys `key`, ..., key + UNIT - 1 of a block."""
    words, scales = raw
    window_words, window_bytes, main_words, main_bytes, listed, window_blocks, has_main = source
    if block < window_blocks:
        for k in T.unroll(UNIT):
            record = listed[block * KEYS + key + k]
            for v in T.vectorized(4):
                words[k, v] = window_words[record, lane * 4 + v]
            scales[k] = T.cast(window_bytes[record, WIDTH + lane // 2], "uint32")
    elif has_main:
        for k in T.unroll(UNIT):
            record = listed[MAX_KEYS + (block - window_blocks) * KEYS + key + k]
            for v in T.vectorized(2):
                words[k, v] = main_words[record, lane * 2 + v]
            scales[k] = T.cast(main_bytes[record, WIDTH // 2 + lane], "uint32")


@T.macro
def _unpack(raw, scratch, target, block, key, lane):
    """Writes what `_fetch` loaded to the tile of the block, as bfloat16."""
    words, scales = raw
    pairs, factor_bits = scratch
    keys, window_blocks, has_main = target
    pair_values = T.view(pairs, (8,), "bfloat16")
    factors = T.view(factor_bits, (4,), "bfloat16")
    sign = T.uint32(0x80008000)
    if block < window_blocks:
        mask = T.uint32(0x07F007F0)
        for k in T.unroll(UNIT):
            factor_bits[0] = (T.min(scales[k], T.uint32(141)) + T.uint32(113)) * T.uint32(0x00800080)
            factor_bits[1] = T.if_then_else(
                scales[k] == T.uint32(255),
                T.uint32(NAN_PAIR),
                (T.max(scales[k], T.uint32(141)) - T.uint32(14)) * T.uint32(0x00800080),
            )
            for part in T.unroll(2):
                for p in T.unroll(2):
                    low, high = words[k, 2 * part], words[k, 2 * part + 1]
                    both = T.if_then_else(
                        p == 0,
                        (low & T.uint32(0xFFFF)) | (high << T.uint32(16)),
                        (low >> T.uint32(16)) | (high & T.uint32(0xFFFF0000)),
                    )
                    pairs[2 * p] = ((both << T.uint32(4)) & mask) | ((both << T.uint32(8)) & sign)
                    pairs[2 * p + 1] = ((both >> T.uint32(4)) & mask) | (both & sign)
                for v in T.vectorized(8):
                    pair_values[v] = pair_values[v] * factors[0]
                for v in T.vectorized(8):
                    keys[block % 2, key + k, _chunk(lane * 2 + part) * 8 + v] = pair_values[v] * factors[2]
    elif has_main:
        mask = T.uint32(0x01C001C0)
        for k in T.unroll(UNIT):
            factor_bits[0] = T.if_then_else(
                scales[k] == T.uint32(127), T.uint32(NAN_PAIR), scales[k] * T.uint32(0x00100010)
            )
            for v in T.vectorized(2):
                factors[v] = factors[v] * T.cast(2.0**120, "bfloat16")
            for v in T.vectorized(2):
                factors[v] = factors[v] * T.cast(2.0**119, "bfloat16")
            for part in T.unroll(2):
                word = words[k, part]
                pairs[0] = ((word << T.uint32(6)) & mask) | ((word << T.uint32(12)) & sign)
                pairs[1] = ((word << T.uint32(2)) & mask) | ((word << T.uint32(8)) & sign)
                pairs[2] = ((word >> T.uint32(2)) & mask) | ((word << T.uint32(4)) & sign)
                pairs[3] = ((word >> T.uint32(6)) & mask) | (word & sign)
                for v in T.vectorized(8):
                    keys[block % 2, key + k, _chunk(lane * 2 + part) * 8 + v] = pair_values[v] * factors[0]


@T.macro
def _load_queries(lines, q, row, head, heads, tx):
    for j in T.unroll(LINES):
        for v in T.vectorized(8):
            lines[j, v] = T.if_then_else(
                head + (j * THREADS + tx) // (WIDTH // 8) < heads,
                q[row, head + (j * THREADS + tx) // (WIDTH // 8), (j * THREADS + tx) % (WIDTH // 8) * 8 + v],
                T.cast(0.0, "bfloat16"),
            )


@T.macro
def _place_queries(lines, swapped, queries, tx):
    for j in T.unroll(LINES):
        for v in T.unroll(8):
            swapped[v] = lines[j, v // 2 + v % 2 * 4]
        chunk = _chunk((j * THREADS + tx) % (WIDTH // 8))
        for v in T.vectorized(8):
            queries[(j * THREADS + tx) // (WIDTH // 8), chunk * 8 + v] = swapped[v]


@T.macro
def _store_result(result, lines, swapped, out, row, head, heads, tx):
    for j in T.unroll(LINES):
        chunk = _chunk((j * THREADS + tx) % (WIDTH // 8))
        for v in T.vectorized(8):
            swapped[v] = result[(j * THREADS + tx) // (WIDTH // 8), chunk * 8 + v]
        for v in T.unroll(8):
            lines[j, v // 2 + v % 2 * 4] = swapped[v]
        number = head + (j * THREADS + tx) // (WIDTH // 8)
        if number < heads:
            for v in T.vectorized(8):
                out[row, number, (j * THREADS + tx) % (WIDTH // 8) * 8 + v] = lines[j, v]


@T.macro
def _weigh(logits, rows, weights, shrinks, changed, slot, first, count, scale):
    """Weights of a block's keys, of which the first `count` are real; keeps the rows' peaks and totals."""
    peak, last_peak, shrink, total, block_total = rows
    T.copy(peak, last_peak)
    if first + KEYS > count:
        for i, j in T.Parallel(HEADS, KEYS):
            logits[i, j] = T.if_then_else(first + j < count, logits[i, j], -T.infinity("float32"))
    T.reduce_max(logits, peak, dim=1, clear=False)
    for i in T.Parallel(HEADS):
        peak[i] = T.if_then_else((peak[i] - last_peak[i]) * scale > SLACK, peak[i], last_peak[i])
        shrink[i] = T.exp2((last_peak[i] - peak[i]) * scale)
        if peak[i] > last_peak[i]:
            changed[slot] = 1
    for i, j in T.Parallel(HEADS, KEYS):
        logits[i, j] = T.exp2(logits[i, j] * scale - peak[i] * scale)
    T.reduce_sum(logits, block_total, dim=1)
    for i in T.Parallel(HEADS):
        total[i] = total[i] * shrink[i] + block_total[i]
    T.copy(logits, weights)
    T.copy(shrink, shrinks)


@cuda_kernel(
    builds=lambda model: [{"has_main": has_main} for has_main in (False, True)],
    pass_configs={
        "tl.disable_thread_storage_sync": True,
        "tl.disable_safe_memory_legalize": True,
        "tl.enable_fast_math": True,
    },
    uses_tensor_cores=True,
)
def kernel(has_main: bool, arch: str):
    n, heads, window_width, main_width = (T.dynamic(x) for x in ("n", "heads", "window_width", "main_width"))
    window_rows, main_rows = T.dynamic("window_rows"), T.dynamic("main_rows")
    in_tensor_memory = arch == "sm_100a"

    @T.prim_func
    def sparse_attention(
        q: T.Tensor((n, heads, WIDTH), "bfloat16"),
        window_words: T.Tensor((window_rows, WINDOW_BYTES // 4), "uint32"),
        window_bytes: T.Tensor((window_rows, WINDOW_BYTES), "uint8"),
        window_index: T.Tensor((n, window_width), "int32"),
        main_words: T.Tensor((main_rows, MAIN_BYTES // 4), "uint32"),
        main_bytes: T.Tensor((main_rows, MAIN_BYTES), "uint8"),
        main_index: T.Tensor((n, main_width), "int32"),
        sink: T.Tensor((heads,), "float32"),
        out: T.Tensor((n, heads, WIDTH), "bfloat16"),
        scale: T.float32,
        window_records: T.int32,
        window_stride: T.int32,
        main_records: T.int32,
        main_stride: T.int32,
    ):
        with T.Kernel(n, T.ceildiv(heads, HEADS), threads=THREADS) as (row, group):
            tx = T.get_thread_binding()
            warp, lane = tx // LANES, tx % LANES
            queries = T.alloc_shared((HEADS, WIDTH), "bfloat16")
            keys = T.alloc_shared((2, KEYS, WIDTH), "bfloat16")
            weights = T.alloc_shared((HEADS, KEYS), "bfloat16")
            shrinks = T.alloc_shared((HEADS,), "float32")
            changed = T.alloc_shared((2,), "int32")  # whether a peak has moved; of blocks in turn
            listed = T.alloc_shared((2 * MAX_KEYS,), "int32")
            totals = T.alloc_shared((2, PER_THREAD * WARPS), "int32")
            window_numbers = T.alloc_local((PER_THREAD,), "int32")
            main_numbers = T.alloc_local((PER_THREAD,), "int32")
            num_window = T.alloc_local((1,), "int32")
            num_main = T.alloc_local((1,), "int32")
            lines = T.alloc_local((LINES, 8), "bfloat16")
            swapped = T.alloc_local((8,), "bfloat16")
            raw0 = T.alloc_local((UNIT, 4), "uint32"), T.alloc_local((UNIT,), "uint32")
            raw1 = T.alloc_local((UNIT, 4), "uint32"), T.alloc_local((UNIT,), "uint32")
            raw2 = T.alloc_local((UNIT, 4), "uint32"), T.alloc_local((UNIT,), "uint32")
            scratch = T.alloc_local((4,), "uint32"), T.alloc_local((2,), "uint32")
            logits = T.alloc_fragment((HEADS, KEYS), "float32")
            values = T.alloc_fragment((HEADS, WIDTH), "float32")
            factors = T.alloc_fragment((HEADS,), "float32")
            peak = T.alloc_fragment((HEADS,), "float32")
            last_peak = T.alloc_fragment((HEADS,), "float32")
            shrink = T.alloc_fragment((HEADS,), "float32")
            total = T.alloc_fragment((HEADS,), "float32")
            block_total = T.alloc_fragment((HEADS,), "float32")
            rows = peak, last_peak, shrink, total, block_total
            if in_tensor_memory:
                products = T.alloc_tmem((HEADS, KEYS), "float32")
                accumulated = T.alloc_tmem((HEADS, WIDTH), "float32")
                multiplied = T.alloc_barrier(1)
                added = T.alloc_barrier(1)

            _load_index(window_numbers, window_index, row, window_width, tx)
            if has_main:
                _load_index(main_numbers, main_index, row, main_width, tx)
            _load_queries(lines, q, row, group * HEADS, heads, tx)
            _list_records(
                window_numbers, window_width, window_records, window_stride, listed, 0, totals, num_window, tx
            )
            num_main[0] = 0
            factor = scale * (SHRUNK * LOG2_E)
            if has_main:
                _list_records(
                    main_numbers, main_width, main_records, main_stride, listed, 1, totals, num_main, tx
                )
            T.sync_threads()
            window_blocks = T.ceildiv(num_window[0], KEYS)
            num_blocks = window_blocks + T.ceildiv(num_main[0], KEYS)
            source = window_words, window_bytes, main_words, main_bytes, listed, window_blocks, has_main
            target = keys, window_blocks, has_main
            if num_blocks > 0:
                _fetch(raw0, source, 0, warp * UNIT, lane)
                _fetch(raw1, source, 0, (WARPS + warp) * UNIT, lane)
            _place_queries(lines, swapped, queries, tx)
            T.fill(values, 0.0)
            if tx < GROUP:
                T.fill(total, 0.0)
                T.fill(peak, -1e30)
            if tx == 0:
                changed[0] = 0
            if num_blocks > 0:
                _unpack(raw0, scratch, target, 0, warp * UNIT, lane)
                if num_blocks > 1:
                    _fetch(raw0, source, 1, warp * UNIT, lane)
                _unpack(raw1, scratch, target, 0, (WARPS + warp) * UNIT, lane)
                if num_blocks > 1 and tx >= GROUP:
                    _fetch(raw1, source, 1, warp * UNIT + PER_ROUND, lane)
                    _fetch(raw2, source, 1, warp * UNIT + 2 * PER_ROUND, lane)
            for block in T.serial(num_blocks):
                T.fence_proxy_async()
                T.sync_threads()
                if tx < GROUP:
                    if in_tensor_memory:
                        T.gemm(
                            queries,
                            keys[block % 2, :, :],
                            products,
                            transpose_B=True,
                            clear_accum=True,
                            mbar=multiplied,
                        )
                    else:
                        T.gemm(
                            queries,
                            keys[block % 2, :, :],
                            logits,
                            transpose_B=True,
                            clear_accum=True,
                            annotations=ASYNC,
                        )
                    if in_tensor_memory:
                        T.copy(products, logits)
                    else:
                        T.wait_wgmma(0)
                    first = T.if_then_else(block < window_blocks, block, block - window_blocks) * KEYS
                    count = T.if_then_else(block < window_blocks, num_window[0], num_main[0])
                    _weigh(logits, rows, weights, shrinks, changed, block % 2, first, count, factor)
                else:
                    if tx == GROUP:
                        changed[(block + 1) % 2] = 0
                    if block + 1 < num_blocks:
                        _unpack(raw0, scratch, target, block + 1, warp * UNIT, lane)
                        if block + 2 < num_blocks:
                            _fetch(raw0, source, block + 2, warp * UNIT, lane)
                        _unpack(raw1, scratch, target, block + 1, warp * UNIT + PER_ROUND, lane)
                        if block + 2 < num_blocks:
                            _fetch(raw1, source, block + 2, warp * UNIT + PER_ROUND, lane)
                        _unpack(raw2, scratch, target, block + 1, warp * UNIT + 2 * PER_ROUND, lane)
                        if block + 2 < num_blocks:
                            _fetch(raw2, source, block + 2, warp * UNIT + 2 * PER_ROUND, lane)
                T.fence_proxy_async()
                T.sync_threads()
                if block > 0 and changed[block % 2] != 0:
                    if in_tensor_memory:
                        T.copy(accumulated, values)
                    T.copy(shrinks, factors)
                    for i, j in T.Parallel(HEADS, WIDTH):
                        values[i, j] = values[i, j] * factors[i]
                    if in_tensor_memory:
                        T.copy(values, accumulated)
                        T.sync_threads()
                if in_tensor_memory:
                    T.gemm(weights, keys[block % 2, :, :], accumulated, clear_accum=block == 0, mbar=added)
                else:
                    T.gemm(weights, keys[block % 2, :, :], values, annotations=ASYNC)
                if block + 1 < num_blocks and tx < GROUP:
                    _unpack(raw0, scratch, target, block + 1, warp * UNIT, lane)
                    if block + 2 < num_blocks:
                        _fetch(raw0, source, block + 2, warp * UNIT, lane)
                if not in_tensor_memory:
                    T.wait_wgmma(0)
            if in_tensor_memory and num_blocks > 0:
                T.copy(accumulated, values)
            if tx < GROUP:
                for i in T.Parallel(HEADS):
                    if group * HEADS + i < heads:
                        total[i] += T.exp2(sink[group * HEADS + i] * LOG2_E - peak[i] * factor)
                    total[i] = T.if_then_else(total[i] > 0, SHRUNK / total[i], 0.0)
                T.copy(total, shrinks)
            T.sync_threads()
            T.copy(shrinks, factors)
            for i, j in T.Parallel(HEADS, WIDTH):
                values[i, j] = values[i, j] * factors[i]
            T.copy(values, queries)
            T.sync_threads()
            _store_result(queries, lines, swapped, out, row, group * HEADS, heads, tx)

    return sparse_attention


def _float(bits):
    return T.reinterpret(bits, "float32")


def _window_value(pool, record, channel):
    """Float32 of one channel of an FP8 record."""
    code = T.cast(pool[record, channel], "uint32")
    scale = T.cast(pool[record, WIDTH + channel // 32], "uint32")
    bits = (code & T.uint32(0x7F)) << T.uint32(20) | (code & T.uint32(0x80)) << T.uint32(24)
    value = T.if_then_else((code & T.uint32(0x7F)) == T.uint32(0x7F), T.uint32(0x7FC00000), bits)
    power = T.if_then_else(scale == T.uint32(0), T.uint32(0x00400000), scale << T.uint32(23))
    return (
        _float(value) * 2.0**120 * _float(T.if_then_else(scale == T.uint32(255), T.uint32(0x7FC00000), power))
    )


def _main_value(pool, record, channel):
    """Float32 of one channel of an FP4 record."""
    code = T.cast(pool[record, channel // 2], "uint32") >> T.cast(channel % 2 * 4, "uint32")
    scale = T.cast(pool[record, WIDTH // 2 + channel // 16], "uint32")
    bits = (code & T.uint32(7)) << T.uint32(22) | (code & T.uint32(8)) << T.uint32(28)
    factor = (scale & T.uint32(0x7F)) << T.uint32(20) | (scale & T.uint32(0x80)) << T.uint32(24)
    factor = T.if_then_else((scale & T.uint32(0x7F)) == T.uint32(0x7F), T.uint32(0x7FC00000), factor)
    return _float(bits) * 2.0**126 * (_float(factor) * 2.0**120)


@T.macro
def _add_keys(
    value_of, pool, index, row, width, records, stride, queries, key, values, state, seen, warp, lane, scale
):
    """Adds the keys of one list whose turn it is for this warp."""
    for column in T.serial(width):
        if index[row, column] >= 0:
            if seen[0] % FLOAT_WARPS == warp:
                record = index[row, column] // records * stride + index[row, column] % records
                state[2] = 0.0
                for c in T.unroll(PER_LANE):
                    key[c] = value_of(pool, record, c * LANES + lane)
                    state[2] += queries[c] * key[c]
                for step in T.unroll(5):
                    state[2] += T.shfl_xor(state[2], 1 << step)
                state[2] *= scale * LOG2_E
                state[3] = T.max(state[0], state[2])
                state[0] = T.exp2(state[0] - state[3])
                state[2] = T.exp2(state[2] - state[3])
                state[1] = state[1] * state[0] + state[2]
                for c in T.unroll(PER_LANE):
                    values[c] = values[c] * state[0] + state[2] * key[c]
                state[0] = state[3]
            seen[0] += 1


@cuda_kernel(builds=lambda model: [])
def in_float32(query: str, window: str, main: str):
    """Any mixture of formats, in float32 without matrix instructions: FLOAT_WARPS warps for a row and a head.

    Warp w takes keys w, w + FLOAT_WARPS, ... of the row's list; their sums are merged in order.
    """
    n, heads, window_width, main_width = (T.dynamic(x) for x in ("n", "heads", "window_width", "main_width"))
    window_rows, main_rows = T.dynamic("window_rows"), T.dynamic("main_rows")
    window_fields = WIDTH if window == "float32" else WINDOW_BYTES
    main_fields = WIDTH if main == "float32" else MAIN_BYTES

    def plain(pool, record, channel):
        return pool[record, channel]

    window_value = plain if window == "float32" else _window_value
    main_value = plain if main == "float32" else _main_value

    @T.prim_func
    def in_float32(
        q: T.Tensor((n, heads, WIDTH), query),
        window_pool: T.Tensor((window_rows, window_fields), window),
        window_index: T.Tensor((n, window_width), "int32"),
        main_pool: T.Tensor((main_rows, main_fields), main),
        main_index: T.Tensor((n, main_width), "int32"),
        sink: T.Tensor((heads,), "float32"),
        out: T.Tensor((n, heads, WIDTH), query),
        scale: T.float32,
        window_records: T.int32,
        window_stride: T.int32,
        main_records: T.int32,
        main_stride: T.int32,
    ):
        with T.Kernel(n, heads, threads=FLOAT_WARPS * LANES) as (row, head):
            tx = T.get_thread_binding()
            warp, lane = tx // LANES, tx % LANES
            sums = T.alloc_shared((FLOAT_WARPS, WIDTH), "float32")
            states = T.alloc_shared((FLOAT_WARPS, 2), "float32")
            queries = T.alloc_local((PER_LANE,), "float32")
            key = T.alloc_local((PER_LANE,), "float32")
            values = T.alloc_local((PER_LANE,), "float32")
            state = T.alloc_local((4,), "float32")  # the largest logit, the sum of weights, two of the moment
            seen = T.alloc_local((1,), "int32")
            for c in T.unroll(PER_LANE):
                queries[c] = T.cast(q[row, head, c * LANES + lane], "float32")
                values[c] = 0.0
            state[0] = -1e30
            state[1] = 0.0
            seen[0] = 0
            _add_keys(
                window_value,
                window_pool,
                window_index,
                row,
                window_width,
                window_records,
                window_stride,
                queries,
                key,
                values,
                state,
                seen,
                warp,
                lane,
                scale,
            )
            _add_keys(
                main_value,
                main_pool,
                main_index,
                row,
                main_width,
                main_records,
                main_stride,
                queries,
                key,
                values,
                state,
                seen,
                warp,
                lane,
                scale,
            )
            for c in T.unroll(PER_LANE):
                sums[warp, c * LANES + lane] = values[c]
            if lane == 0:
                states[warp, 0] = state[0]
                states[warp, 1] = state[1]
            T.sync_threads()
            state[0] = sink[head] * LOG2_E
            for w in T.unroll(FLOAT_WARPS):
                state[0] = T.max(state[0], states[w, 0])
            state[1] = T.exp2(sink[head] * LOG2_E - state[0])
            for w in T.unroll(FLOAT_WARPS):
                state[1] += states[w, 1] * T.exp2(states[w, 0] - state[0])
            for c in T.unroll(PER_LANE // FLOAT_WARPS):
                channel = (c * FLOAT_WARPS + warp) * LANES + lane
                state[2] = 0.0
                for w in T.unroll(FLOAT_WARPS):
                    state[2] += sums[w, channel] * T.exp2(states[w, 0] - state[0])
                state[2] = T.if_then_else(seen[0] > 0, state[2] / state[1], 0.0)
                out[row, head, channel] = T.cast(state[2], query)

    return in_float32


def run(
    q: Tensor,
    window_pool: Tensor,
    window_index: Tensor,
    main_pool: Tensor | None,
    main_index: Tensor | None,
    sink: Tensor,
    scale: float,
) -> Tensor:
    q, window_index, sink = q.contiguous(), window_index.contiguous(), sink.contiguous()
    out = torch.empty_like(q)
    if main_pool is None or main_index is None:  # any memory: nothing is read
        fields = MAIN_BYTES if window_pool.dtype == torch.uint8 else WIDTH
        main_pool, main_index = window_pool[:1, :1, :fields], window_index[:, :0]
    main_index = main_index.contiguous()
    window, main = flat_rows(window_pool), flat_rows(main_pool)
    places = window_pool.shape[1], rows_per_part(window_pool), main_pool.shape[1], rows_per_part(main_pool)
    if q.dtype == torch.bfloat16 and window.dtype == torch.uint8 and main.dtype == torch.uint8:
        assert max(window_index.shape[1], main_index.shape[1]) <= MAX_KEYS, f"{main_index.shape=}"
        assert window.data_ptr() % 16 == 0 and main.data_ptr() % 16 == 0, (
            "records lie at multiples of 16 bytes"
        )
        pools = window.view(torch.uint32), window, window_index, main.view(torch.uint32), main, main_index
        program = kernel(has_main=main_index.shape[1] > 0)
        program(q, *pools, sink, out, scale, *places)
    else:
        formats = [str(x.dtype).removeprefix("torch.") for x in (q, window, main)]
        program = in_float32(query=formats[0], window=formats[1], main=formats[2])
        program(q, window, window_index, main, main_index, sink, out, scale, *places)
    return out
