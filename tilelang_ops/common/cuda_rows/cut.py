"""The cut of a truncation: masses, a sorted list of the tokens in question, bisection where it overflows."""

import tilelang.language as T

from tilelang_ops.common.cuda_noise import keep
from tilelang_ops.common.cuda_rows.draw import start_draw
from tilelang_ops.common.cuda_rows.places import MAGIC, guess_places, place
from tilelang_ops.common.cuda_rows.row import (
    BINS,
    HIGH_PLACE,
    K_PLACE,
    LIST_SIZE,
    LOW_PLACE,
    LOWEST,
    added,
    largest,
    pack,
    packed_score,
    reduce_block,
    scan_block,
    smaller,
    walk,
)

RETRY_PLACES = 4
MASS_POLYNOMIAL = (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)


@T.macro
def mass_of(distance):
    """floor(exp(distance) * 2^40) of a float32 <= 0 as int64: `exp_mass` of the reference, step by step."""
    x = keep(T.max(distance, T.float32(-60.0)))
    turned = keep(T.ieee_add(x * T.float32(1.44269504), T.float32(12582912.0)))
    n = keep(T.ieee_sub(turned, T.float32(12582912.0)))
    remainder = keep((x - n * T.float32(0.693359375)) + n * T.float32(2.12194440e-4))
    p = T.alloc_local((1,), "float32")
    p[0] = T.float32(1.9875691500e-4)
    for coefficient in MASS_POLYNOMIAL:
        p[0] = p[0] * remainder + T.float32(coefficient)
    p[0] = p[0] * remainder * remainder + remainder + T.float32(1.0)
    scale = (T.reinterpret(turned, "uint32") << T.uint32(23)) + T.uint32((127 + 40) << 23)
    return keep(T.cast(p[0] * T.reinterpret(scale, "float32"), "int64"))


@T.macro
def sort_list(r, size):
    """Sorts list[0 : size] in descending order, size a power of two."""
    width = T.alloc_local((1,), "int32")
    stride = T.alloc_local((1,), "int32")
    at = T.alloc_local((1,), "int32")
    width[0] = 2
    while width[0] <= size:
        stride[0] = width[0] // 2
        while stride[0] > 0:
            at[0] = r.thread
            while at[0] < size // 2:
                low = keep((at[0] // stride[0]) * (2 * stride[0]) + at[0] % stride[0])
                high = keep(low + stride[0])
                a = keep(r.list[low])
                b = keep(r.list[high])
                descends = (low // width[0]) % 2 == 0
                if (descends and a < b) or (not descends and a > b):
                    r.list[low] = b
                    r.list[high] = a
                at[0] = at[0] + r.num_threads
            T.sync_threads()
            stride[0] = stride[0] // 2
        width[0] = width[0] * 2


@T.macro
def collect(r, base, group):
    """Puts the tokens of the places in question on the list."""
    for j in T.unroll(4):
        at = r.places[j]
        is_inside = (at >= r.low[0] and at <= r.high[0]) or at == r.k_place[0]
        if is_inside and r.scores[base + j] >= r.floor[0]:
            slot = T.atomic_add(r.ints[LIST_SIZE], 1, return_prev=True)
            if slot < r.capacity:
                r.list[slot] = pack(r, r.scores[base + j], group * 4 + j)


@T.macro
def add_masses(r, base):
    """Sums the masses of a group: above the places in question, and of all that count."""
    for j in T.unroll(4):
        if r.scores[base + j] >= r.floor[0] and r.places[j] >= r.k_place[0]:
            mass = mass_of(r.scores[base + j] - r.peak[0])
            r.mass_all[0] = r.mass_all[0] + mass
            if r.places[j] > r.high[0]:
                r.mass_above[0] = r.mass_above[0] + mass


@T.macro
def add_near_masses(r, base):
    """The same in float32."""
    for j in T.unroll(4):
        if r.scores[base + j] >= r.floor[0] and r.places[j] >= r.k_place[0]:
            mass = keep(T.__exp(r.scores[base + j] - r.peak[0]))
            r.near_all[0] = r.near_all[0] + mass
            if r.places[j] > r.high[0]:
                r.near_above[0] = r.near_above[0] + mass


@T.macro
def finish_masses(r):
    """Masses of the whole row, after the walk; near ones are off by 2^-15 of all at most.

    A thread's 2^8 terms cost as many roundings of 2^-24, and an exponential is as good as 2^-18.
    """
    if r.is_exact[0] == 1:
        reduce_block(r, r.mass_above, added)
        reduce_block(r, r.mass_all, added)
        r.doubt[0] = T.int64(0)
    else:
        reduce_block(r, r.near_above, added)
        reduce_block(r, r.near_all, added)
        r.mass_above[0] = T.cast(r.near_above[0] * T.float32(2.0**40), "int64")
        r.mass_all[0] = T.cast(r.near_all[0] * T.float32(2.0**40), "int64")
        # A comparison has a mass on both sides.
        r.doubt[0] = T.cast(r.near_all[0] * T.float32(2.0**26), "int64") + T.int64(1)


@T.macro
def read_list(r):
    """The cut, if it lies in the list and the list is whole: sets r.is_found, r.cut and r.sure_cut.

    With near masses the cut keeps all that may stay.
    """
    size = T.alloc_local((1,), "int32")
    at = T.alloc_local((1,), "int32")
    own = T.alloc_local((1,), "int64")
    before = T.alloc_local((1,), "int64")
    total = T.alloc_local((1,), "int64")
    inner = T.alloc_local((1,), "int64")
    num_first = T.alloc_local((1,), "int64")  # of the list's tokens in the nucleus' places
    count = r.ints[LIST_SIZE]
    size[0] = r.num_threads
    while size[0] < count:
        size[0] = size[0] * 2
    at[0] = count + r.thread
    while at[0] < size[0]:
        r.list[at[0]] = T.uint64(0)
        at[0] = at[0] + r.num_threads
    T.sync_threads()
    sort_list(r, size[0])
    per_thread = size[0] // r.num_threads
    first = r.thread * per_thread
    # Masses of the list: all, and those of the nucleus' places.
    own[0] = 0
    inner[0] = 0
    num_first[0] = 0
    for i in T.serial(per_thread):
        if first + i < count:
            score = packed_score(r, r.list[first + i])
            mass = mass_of(score - r.peak[0])
            own[0] = own[0] + mass
            if place(r, score) >= r.low[0]:
                inner[0] = inner[0] + mass
                num_first[0] = num_first[0] + T.int64(1)
    reduce_block(r, inner, added)
    reduce_block(r, num_first, added)
    scan_block(r, own, before, total)
    # What lies between the nucleus' places and the k-th token's.
    mass_between = r.mass_all[0] - r.mass_above[0] - total[0]
    num_above = T.alloc_local((1,), "int64")
    num_between = T.alloc_local((1,), "int64")
    num_above[0] = 0
    num_between[0] = 0
    if r.top_k[0] > 0:
        own[0] = 0
        for i in T.serial(BINS // r.num_threads):
            at_place = T.cast(i * r.num_threads + r.thread, "float32") + T.float32(MAGIC)
            here = T.cast(r.counts[i * r.num_threads + r.thread], "int64")
            if at_place > r.high[0]:
                num_above[0] = num_above[0] + here
            if at_place < r.low[0] and at_place > r.k_place[0]:
                num_between[0] = num_between[0] + here
        reduce_block(r, num_above, added)
        reduce_block(r, num_between, added)
    # The mass that top-p is a share of.
    whole = T.alloc_local((1,), "int64")
    whole[0] = 0
    for i in T.serial(per_thread):
        if first + i < count:
            rank = (
                num_above[0]
                + first
                + i
                + T.if_then_else(first + i >= num_first[0], num_between[0], T.int64(0))
            )
            if r.top_k[0] <= 0 or rank < r.top_k[0]:
                whole[0] = whole[0] + mass_of(packed_score(r, r.list[first + i]) - r.peak[0])
    reduce_block(r, whole, added)
    whole[0] = whole[0] + r.mass_above[0] + mass_between
    share = T.cast(r.top_p[0], "float64") * T.cast(whole[0], "float64")
    r.threshold[0] = T.cast(T.floor(share), "int64")
    # The last token that stays.
    r.cut[0] = ~T.uint64(0)
    r.sure_cut[0] = ~T.uint64(0)
    before[0] = before[0] + r.mass_above[0]
    for i in T.serial(per_thread):
        if first + i < count:
            key = r.list[first + i]
            is_second = first + i >= num_first[0]
            rank = num_above[0] + first + i + T.if_then_else(is_second, num_between[0], T.int64(0))
            ahead = before[0] + T.if_then_else(is_second, mass_between, T.int64(0))
            if r.top_k[0] <= 0 or rank < r.top_k[0]:
                if r.top_p[0] >= T.float32(1.0) or ahead <= r.threshold[0] + r.doubt[0]:
                    r.cut[0] = T.min(r.cut[0], key)
                if r.top_p[0] >= T.float32(1.0) or ahead <= r.threshold[0] - r.doubt[0]:
                    r.sure_cut[0] = T.min(r.sure_cut[0], key)
            before[0] = before[0] + mass_of(packed_score(r, key) - r.peak[0])
    reduce_block(r, r.cut, smaller)
    reduce_block(r, r.sure_cut, smaller)
    if count == 0:
        r.cut[0] = T.uint64(0)
        r.sure_cut[0] = T.uint64(0)
    r.is_found[0] = 1
    if r.top_p[0] < T.float32(1.0):
        if r.mass_above[0] > r.threshold[0] - r.doubt[0]:
            r.is_found[0] = 0
        bottom = T.max(r.k_place[0], T.max(place(r, r.floor[0]), T.float32(MAGIC)))
        if r.low[0] > bottom and r.mass_above[0] + inner[0] <= r.threshold[0] + r.doubt[0]:
            r.is_found[0] = 0


@T.macro
def _weigh_above(r, base, group):
    """Counts the tokens above r.limit, or sums their masses if they stay by r.cut."""
    for j in T.unroll(4):
        key = pack(r, r.scores[base + j], group * 4 + j)
        if r.scores[base + j] >= r.floor[0] and group * 4 + j < r.vocab and key > r.limit[0]:
            if r.weighs[0] == 0:
                r.count[0] = r.count[0] + T.int64(1)
            elif key >= r.cut[0]:
                r.count[0] = r.count[0] + mass_of(r.scores[base + j] - r.peak[0])


@T.macro
def bisect_cut(r):
    """The cut of any row, a walk per bit: first top-k's, then, knowing the mass it keeps, top-p's."""
    low = T.alloc_local((1,), "uint64")
    high = T.alloc_local((1,), "uint64")
    r.cut[0] = T.uint64(0)
    r.threshold[0] = T.cast(r.top_k[0], "int64") - T.int64(1)
    r.weighs[0] = T.if_then_else(r.top_k[0] > 0, 0, 1)  # 0: top-k, 1: the whole mass, 2: top-p, 3: done
    if r.top_k[0] <= 0 and r.top_p[0] >= T.float32(1.0):
        r.weighs[0] = 3
    low[0] = pack(r, r.floor[0], r.vocab - 1)
    high[0] = pack(r, r.peak[0], 0)
    while r.weighs[0] < 3:
        r.limit[0] = low[0] + (high[0] - low[0]) // T.uint64(2)
        if r.weighs[0] == 1:
            r.limit[0] = T.uint64(0)
        r.count[0] = T.int64(0)
        walk(r, _weigh_above)
        reduce_block(r, r.count, added)
        if r.weighs[0] == 1:
            share = T.cast(r.top_p[0], "float64") * T.cast(r.count[0], "float64")
            r.threshold[0] = T.cast(T.floor(share), "int64")
            r.weighs[0] = 2
        else:
            if r.count[0] <= r.threshold[0]:
                high[0] = r.limit[0]
            else:
                low[0] = r.limit[0] + T.uint64(1)
            if low[0] >= high[0]:
                # The smallest key above which not too much lies.
                r.cut[0] = T.max(r.cut[0], low[0])
                r.weighs[0] = T.if_then_else(r.weighs[0] == 0 and r.top_p[0] < T.float32(1.0), 1, 3)
                low[0] = pack(r, r.floor[0], r.vocab - 1)
                high[0] = pack(r, r.peak[0], 0)


@T.macro
def find_cut(r, log_min_p, survey):
    """The key of the last token that stays, in r.cut; r.floor is set as well.

    Args:
        log_min_p: float32, -inf where off.
        survey: macro of walk 2: fills r.places and calls `add_masses` and `collect`, see `survey_group`.
    """
    attempt = T.alloc_local((1,), "int32")
    r.floor[0] = T.max(r.peak[0] + log_min_p, T.float32(LOWEST))
    r.cut[0] = T.uint64(0)
    r.is_found[0] = 0
    bottom = T.cast(place(r, r.floor[0]) - T.float32(MAGIC), "int32")
    guess_places(r, bottom)
    attempt[0] = 0
    while r.is_found[0] == 0 and attempt[0] < 2:
        wider = T.float32(RETRY_PLACES) * T.cast(attempt[0], "float32")
        lowest = T.if_then_else(r.top_k[0] > 0, T.max(r.ints[K_PLACE], bottom), bottom)
        r.k_place[0] = T.if_then_else(
            r.top_k[0] > 0, T.cast(r.ints[K_PLACE], "float32") + T.float32(MAGIC), T.float32(0.0)
        )
        if r.top_p[0] < T.float32(1.0):
            r.high[0] = T.cast(T.max(r.ints[HIGH_PLACE], lowest), "float32") + wider + T.float32(MAGIC)
            r.low[0] = T.cast(T.max(r.ints[LOW_PLACE], r.ints[K_PLACE]), "float32") - wider + T.float32(MAGIC)
            r.low[0] = T.min(T.max(r.low[0], r.k_place[0]), r.high[0])
        else:
            r.high[0] = T.if_then_else(
                r.top_k[0] > 0, T.cast(lowest, "float32") + T.float32(MAGIC), T.float32(0.0)
            )
            r.low[0] = r.high[0]
        r.mass_above[0] = 0
        r.mass_all[0] = 0
        r.near_above[0] = 0.0
        r.near_all[0] = 0.0
        if r.thread == 0:
            r.ints[LIST_SIZE] = 0
        start_draw(r)
        T.sync_threads()
        walk(r, survey)
        finish_masses(r)
        if r.ints[LIST_SIZE] <= r.capacity:
            read_list(r)
            attempt[0] = attempt[0] + 1
        else:
            attempt[0] = 2
    if r.is_found[0] == 0:
        bisect_cut(r)
        r.sure_cut[0] = r.cut[0]


@T.macro
def survey_group(r, base):
    """Walk 2 of a group but for collecting and drawing: places, and masses where top-p needs them."""
    for j in T.unroll(4):
        r.places[j] = place(r, r.scores[base + j])
    if r.top_p[0] < T.float32(1.0) and largest(r.scores, base) - r.peak[0] > T.float32(-28.0):
        if r.is_exact[0] == 1:
            add_masses(r, base)
        else:
            add_near_masses(r, base)
