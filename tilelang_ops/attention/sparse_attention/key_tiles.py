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
UNPACKERS = 256  # threads of the groups that fetch and unpack
WARPS = UNPACKERS // LANES
UNIT = 4  # keys that a warp fetches and unpacks at once
UNITS = KEYS // (UNIT * WARPS)  # of a warp in a tile
MAX_KEYS = 512  # of a row in one pool
LISTERS = 128  # threads that list a row
NAN_PAIR = 0x7FC07FC0
LISTING = 8  # named barrier among those who list
THREADS = 512  # of a block
FREED = 10  # named barrier of all: the other half of the other tile has served


@T.macro
def load_number(number, indices, row, chunk, thread):
    """This thread's number of a chunk of a row's indices, -1 beyond their ends."""
    window_index, window, main_index, main = indices
    window_chunks = T.ceildiv(window[0], LISTERS)
    number[0] = -1
    if chunk < window_chunks:
        if chunk * LISTERS + thread < window[0]:
            number[0] = window_index[row, chunk * LISTERS + thread]
    elif (chunk - window_chunks) * LISTERS + thread < main[0]:
        number[0] = main_index[row, (chunk - window_chunks) * LISTERS + thread]


@T.macro
def list_chunks(state, indices, lists, row, slot, begin, count, thread):
    """Writes the rows of the pools that chunks of indices name to `listed`, behind those of earlier ones.

    Copies of a pool's last one fill up KEYS.
    """
    listed, totals, counts = lists
    ahead, number, found, place = state
    window, main = indices[1], indices[3]
    window_chunks = T.ceildiv(window[0], LISTERS)
    chunks = window_chunks + T.ceildiv(main[0], LISTERS)
    warp, lane = thread // LANES, thread % LANES
    for i in T.serial(T.min(count, chunks - begin)):
        chunk = begin + i
        number[0] = ahead[0]
        load_number(ahead, indices, row, chunk + 1, thread)
        is_main = chunk >= window_chunks
        pool = T.if_then_else(is_main, 1, 0)
        votes = T.cast(T.ballot(number[0] >= 0), "uint32")
        if lane == 0:
            totals[chunk % 2, warp] = T.cast(T.popcount(votes), "int32")
        T.sync_threads(LISTING, LISTERS)
        place[0] = found[0]
        for w in T.unroll(LISTERS // LANES):
            if w < warp:
                place[0] += totals[chunk % 2, w]
            found[0] += totals[chunk % 2, w]
        if number[0] >= 0:
            before = votes & ((T.uint32(1) << T.cast(lane, "uint32")) - T.uint32(1))
            listed[slot, pool, place[0] + T.cast(T.popcount(before), "int32")] = record_row(
                number[0],
                T.if_then_else(is_main, main[1], window[1]),
                T.if_then_else(is_main, main[2], window[2]),
            )
        if chunk + 1 == window_chunks or chunk + 1 == chunks:
            T.sync_threads(LISTING, LISTERS)
            if found[0] > 0 and found[0] + thread < T.ceildiv(found[0], KEYS) * KEYS:
                listed[slot, pool, found[0] + thread] = listed[slot, pool, found[0] - 1]
            if thread == 0:
                counts[slot, pool] = found[0]
            found[0] = 0


@T.macro
def wait_for_half():
    """Until the other half of the tile that is unpacked to has served."""
    T.sync_threads(FREED, THREADS)


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
    scales[0] = window_words[record_of_scale, WIDTH // 4 + lane % 4]


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
def fetch(raw, source, slot, tiles, tile, unit, warp, lane):
    """Loads this lane's part of a warp's keys of a tile: all, or a unit of a tile of the window."""
    if tile < tiles[0]:
        _fetch_window(raw, unit, source, slot, tile, warp, lane)
    elif tiles[1] > 0:
        for main_unit in T.unroll(UNITS):
            _fetch_main(raw, main_unit, source, slot, tile - tiles[0], warp, lane)


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
        four = T.shfl_sync(scales[0], k * 4 + lane // 8)
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
def _unpack_main(raw, scratch, keys, buffer, in_use, warp, lane):
    """Writes what `_fetch_main` loaded to a tile; otherwise as `_unpack_window`."""
    words, scales = raw
    pairs, factor_bits = scratch
    pair_values = T.view(pairs, (8,), "bfloat16")
    factors = T.view(factor_bits, (4,), "bfloat16")
    sign, mask = T.uint32(0x80008000), T.uint32(0x01C001C0)
    swap = lane // 4 % 2
    for k in T.unroll(UNIT * UNITS):
        if in_use and k == UNIT:
            wait_for_half()
        four = T.shfl_sync(scales[k // UNIT], k % UNIT * 8 + lane // 4)
        scale = _permuted(four, T.uint32(0), 0x4440 | T.cast(lane % 4, "uint32"))
        factor_bits[0] = T.if_then_else(
            T.cast(scale, "int32") == 127, T.uint32(NAN_PAIR), scale * T.uint32(0x00100010)
        )
        for v in T.vectorized(2):
            factors[v] = factors[v] * T.cast(2.0**120, "bfloat16")
        for v in T.vectorized(2):
            factors[v] = factors[v] * T.cast(2.0**119, "bfloat16")
        first = k * 2
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
            key = k * WARPS + warp
            for v in T.vectorized(8):
                keys[buffer, key, (lane * 2 + (part ^ swap)) * 8 + v] = pair_values[v]


@T.macro
def advance(raws, scratch, source, keys, plan, tiles, buffer, in_use, has_next, thread, mine):
    """Unpacks a tile of a list, whose first records were fetched before, and fetches those of another.

    A row without keys has one tile, of zeros.
    """
    raw, ahead = raws
    slot, tile, next_slot, next_tile = plan[0], plan[1], plan[2], plan[3]
    is_window = tile < tiles[0]
    for unit in T.serial(T.if_then_else(is_window, UNITS, 1)):
        # What follows from the thread's number is worked out anew each time: a shuffle hides that it never
        # changes, which would take more registers than there are.
        mine[0] = T.shfl_sync(thread, thread % LANES)
        warp, lane = mine[0] // LANES, mine[0] % LANES
        is_within = is_window and unit + 1 < UNITS
        if is_within or has_next:
            fetch(
                ahead,
                source,
                T.if_then_else(is_within, slot, next_slot),
                (T.if_then_else(is_within, tiles[0], tiles[2]), tiles[3]),
                T.if_then_else(is_within, tile, next_tile),
                T.if_then_else(is_within, unit + 1, 0),
                warp,
                lane,
            )
        if is_window:
            if in_use and unit + 1 == UNITS:
                wait_for_half()
            _unpack_window(raw, unit, scratch, keys, buffer, warp, lane)
        elif tiles[1] > 0:
            _unpack_main(raw, scratch, keys, buffer, in_use, warp, lane)
        else:
            if in_use:
                wait_for_half()
            for k in T.unroll(KEYS // WARPS):
                for part in T.unroll(2):
                    for v in T.vectorized(8):
                        keys[buffer, k * WARPS + warp, (lane * 2 + part) * 8 + v] = T.cast(0.0, "bfloat16")
        for w in T.unroll(UNIT * 4):
            raw[0][w] = ahead[0][w]
        for w in T.unroll(UNITS):
            raw[1][w] = ahead[1][w]
