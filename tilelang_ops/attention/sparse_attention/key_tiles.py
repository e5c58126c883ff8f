"""Tiles of keys of sparse_attention on CUDA: rows are listed, their records fetched and unpacked to bfloat16.

Unpacking is exact in bfloat16: codes become floats whose exponent is off by a constant, subnormals included,
and a product with a power of two, or with an E4M3 scale, sets it right. So that an E4M3 scale and its
constant are one finite factor, keys of the main pool are the true ones / 128; weights make up for it.
Tensor cores count subnormals as 0, and sums reach as far as float32:

    window   the value whenever that is a normal float32; stored scales are the E8M0 bytes 105 to 247, bytes
             10 to 246 give normal numbers for every code
    main     every code and E4M3 scale: values / 128 lie between 2^-17 and 21

A NaN scale gives NaN. (An E4M3 code of NaN under a number for a scale, which nothing stores, would count as
480.)

    E4M3  s eeee mmm  ->  s 0000 eeee mmm 0000  =  value * 2^-120
    E2M1  s ee m      ->  s 000000 ee m 000000  =  value * 2^-126
"""

from tilelang.cuda import language as T

from tilelang_ops.attention.sparse_attention.in_float32 import LANES, WIDTH
from tilelang_ops.common.cuda_numerics import record_row

KEYS = 64  # of a tile
UNPACKERS = 256  # threads of the groups that list, fetch and unpack
WARPS = UNPACKERS // LANES
UNIT = 4  # keys that a warp fetches and unpacks at once
UNITS = KEYS // (UNIT * WARPS)  # of a warp in a tile
MAX_KEYS = 512  # of a row in one pool
PER_THREAD = MAX_KEYS // UNPACKERS
NAN_PAIR = 0x7FC07FC0
UNPACKING = 3  # named barrier among those who unpack


@T.macro
def _load_index(numbers, index, row, width, thread):
    """This thread's part of a row's index, -1 beyond its end."""
    for j in T.unroll(PER_THREAD):
        numbers[j] = -1
        if j * UNPACKERS + thread < width:
            numbers[j] = index[row, j * UNPACKERS + thread]


@T.macro
def _list_pool(numbers, source, lists, slot, pool, thread):
    """Writes the rows of a pool that the threads' `numbers` name, in order, to listed[slot, pool, ...].

    Copies of the last one fill up KEYS.
    """
    width, records, stride = source
    listed, totals, counts, found, place = lists
    warp, lane = thread // LANES, thread % LANES
    for j in T.unroll(PER_THREAD):
        if j * UNPACKERS < width:
            votes = T.cast(T.ballot(numbers[j] >= 0), "uint32")
            if lane == 0:
                totals[pool, j * WARPS + warp] = T.cast(T.popcount(votes), "int32")
    T.sync_threads(UNPACKING, UNPACKERS)
    found[0] = 0
    for j in T.unroll(PER_THREAD):
        if j * UNPACKERS < width:
            place[0] = found[0]
            for w in T.unroll(WARPS):
                if w < warp:
                    place[0] += totals[pool, j * WARPS + w]
                found[0] += totals[pool, j * WARPS + w]
            votes = T.cast(T.ballot(numbers[j] >= 0), "uint32")
            if numbers[j] >= 0:
                before = votes & ((T.uint32(1) << T.cast(lane, "uint32")) - T.uint32(1))
                place[0] += T.cast(T.popcount(before), "int32")
                listed[slot, pool, place[0]] = record_row(numbers[j], records, stride)
    T.sync_threads(UNPACKING, UNPACKERS)
    if found[0] > 0 and found[0] + thread < T.ceildiv(found[0], KEYS) * KEYS:
        listed[slot, pool, found[0] + thread] = listed[slot, pool, found[0] - 1]
    if thread == 0:
        counts[slot, pool] = found[0]


@T.macro
def list_row(numbers, indices, row, lists, slot, thread):
    """Lists the records of a row."""
    window_index, window, main_index, main = indices
    _load_index(numbers[0], window_index, row, window[0], thread)
    _load_index(numbers[1], main_index, row, main[0], thread)
    _list_pool(numbers[0], window, lists, slot, 0, thread)
    _list_pool(numbers[1], main, lists, slot, 1, thread)
    T.sync_threads(UNPACKING, UNPACKERS)


@T.macro
def _fetch_window(raw, unit, source, slot, tile, warp, lane):
    """Loads this lane's 16 codes of each of UNIT keys of a tile, and one of their UNIT * 4 scale words."""
    words, scales = raw
    window_words, listed = source[0], source[2]
    first = tile * KEYS + unit * UNIT * WARPS + warp
    for k in T.unroll(UNIT):
        record = listed[slot, 0, first + k * WARPS]
        for v in T.vectorized(4):
            words[k * 4 + v] = window_words[record, lane * 4 + v]
    record_of_scale = listed[slot, 0, first + lane // 4 % UNIT * WARPS]
    scales[unit] = window_words[record_of_scale, WIDTH // 4 + lane % 4]


@T.macro
def _fetch_main(raw, unit, source, slot, tile, warp, lane):
    """Likewise of a tile of the other pool, with UNIT * 8 words of scales."""
    words, scales = raw
    main_words, listed = source[1], source[2]
    first = tile * KEYS + unit * UNIT * WARPS + warp
    for k in T.unroll(UNIT):
        record = listed[slot, 1, first + k * WARPS]
        for v in T.vectorized(2):
            words[(unit * UNIT + k) * 2 + v] = main_words[record, lane * 2 + v]
    record_of_scale = listed[slot, 1, first + lane // 8 * WARPS]
    scales[unit] = main_words[record_of_scale, WIDTH // 8 + lane % 8]


@T.macro
def fetch(raw, unit, source, counts, slot, tile, warp, lane):
    """Loads this lane's part of a unit of a warp's keys; of the window the first, which takes all room."""
    window_tiles = T.ceildiv(counts[slot, 0], KEYS)
    if tile < window_tiles:
        if unit + 1 == UNITS:
            _fetch_window(raw, 0, source, slot, tile, warp, lane)
    elif counts[slot, 1] > 0:
        _fetch_main(raw, unit, source, slot, tile - window_tiles, warp, lane)


def _permuted(low, high, selector):
    """Bytes of a word: digit i of the selector names one of eight, those of `low` first."""
    return T.call_extern("uint32", "__byte_perm", low, high, T.cast(selector, "uint32"))


@T.macro
def _unpack_window(raw, unit, scratch, keys, buffer, warp, lane):
    """Writes what `_fetch_window` loaded to a tile, as bfloat16.

    Of a lane's two runs of 8 channels every other four lanes write the second first: no bank is met twice.
    """
    words, scales = raw
    pairs, factor_bits = scratch
    pair_values = T.view(pairs, (8,), "bfloat16")
    factors = T.view(factor_bits, (4,), "bfloat16")
    sign, mask = T.uint32(0x80008000), T.uint32(0x07F007F0)
    swap = lane // 4 % 2
    for k in T.unroll(UNIT):
        four = T.shfl_sync(scales[unit], k * 4 + lane // 8)
        scale = _permuted(four, T.uint32(0), 0x4440 | T.cast(lane // 2 % 4, "uint32"))
        factor_bits[0] = (T.min(scale, T.uint32(134)) + T.uint32(120)) * T.uint32(0x00800080)
        factor_bits[1] = T.if_then_else(
            T.cast(scale, "int32") == 255,
            T.uint32(NAN_PAIR),
            (T.max(scale, T.uint32(134)) - T.uint32(7)) * T.uint32(0x00800080),
        )
        for part in T.unroll(2):
            for half in T.unroll(2):
                word = T.if_then_else(swap == part, words[k * 4 + half], words[k * 4 + 2 + half])
                low = _permuted(word, T.uint32(0), 0x1404)
                high = _permuted(word, T.uint32(0), 0x3424)
                pairs[2 * half] = (low & sign) | ((low >> T.uint32(4)) & mask)
                pairs[2 * half + 1] = (high & sign) | ((high >> T.uint32(4)) & mask)
            for p in T.unroll(4):
                for v in T.vectorized(2):
                    pair_values[2 * p + v] = pair_values[2 * p + v] * factors[v]
                for v in T.vectorized(2):
                    pair_values[2 * p + v] = pair_values[2 * p + v] * factors[2 + v]
            key = (unit * UNIT + k) * WARPS + warp
            for v in T.vectorized(8):
                keys[buffer, key, (lane * 2 + (part ^ swap)) * 8 + v] = pair_values[v]


@T.macro
def _unpack_main(raw, unit, scratch, keys, buffer, warp, lane):
    """Writes what `_fetch_main` loaded to a tile; otherwise as `_unpack_window`."""
    words, scales = raw
    pairs, factor_bits = scratch
    pair_values = T.view(pairs, (8,), "bfloat16")
    factors = T.view(factor_bits, (4,), "bfloat16")
    sign, mask = T.uint32(0x80008000), T.uint32(0x01C001C0)
    swap = lane // 4 % 2
    for k in T.unroll(UNIT):
        four = T.shfl_sync(scales[unit], k * 8 + lane // 4)
        scale = _permuted(four, T.uint32(0), 0x4440 | T.cast(lane % 4, "uint32"))
        factor_bits[0] = T.if_then_else(
            T.cast(scale, "int32") == 127, T.uint32(NAN_PAIR), scale * T.uint32(0x00100010)
        )
        for v in T.vectorized(2):
            factors[v] = factors[v] * T.cast(2.0**120, "bfloat16")
        for v in T.vectorized(2):
            factors[v] = factors[v] * T.cast(2.0**119, "bfloat16")
        first = (unit * UNIT + k) * 2
        for part in T.unroll(2):
            odd = T.if_then_else(swap == part, words[first], words[first + 1])
            even = odd << T.uint32(4)
            # Each nibble at the upper end of both bytes of a half.
            for p, selector in enumerate((0x4400, 0x5511, 0x6622, 0x7733)):
                both = _permuted(even, odd, selector)
                pairs[p] = (both & sign) | ((both << T.uint32(2)) & mask)
            for p in T.unroll(4):
                for v in T.vectorized(2):
                    pair_values[2 * p + v] = pair_values[2 * p + v] * factors[v]
            key = (unit * UNIT + k) * WARPS + warp
            for v in T.vectorized(8):
                keys[buffer, key, (lane * 2 + (part ^ swap)) * 8 + v] = pair_values[v]


@T.macro
def advance(raw, scratch, source, keys, counts, plan, buffer, has_next, warp, lane):
    """Unpacks a tile of a list, whose first records were fetched before, and fetches those of another.

    A row without keys has one tile, of zeros.
    """
    slot, tile, next_slot, next_tile = plan[0], plan[1], plan[2], plan[3]
    if tile < T.ceildiv(counts[slot, 0], KEYS):
        for unit in T.unroll(UNITS):
            _unpack_window(raw, unit, scratch, keys, buffer, warp, lane)
            if unit + 1 < UNITS:
                _fetch_window(raw, unit + 1, source, slot, tile, warp, lane)
        if has_next:
            for unit in T.unroll(UNITS):
                fetch(raw, unit, source, counts, next_slot, next_tile, warp, lane)
    elif counts[slot, 1] > 0:
        for unit in T.unroll(UNITS):
            _unpack_main(raw, unit, scratch, keys, buffer, warp, lane)
            if has_next:
                fetch(raw, unit, source, counts, next_slot, next_tile, warp, lane)
    else:
        for k in T.unroll(KEYS // WARPS):
            for part in T.unroll(2):
                for v in T.vectorized(8):
                    keys[buffer, k * WARPS + warp, (lane * 2 + part) * 8 + v] = T.cast(0.0, "bfloat16")
        if has_next:
            for unit in T.unroll(UNITS):
                fetch(raw, unit, source, counts, next_slot, next_tile, warp, lane)
