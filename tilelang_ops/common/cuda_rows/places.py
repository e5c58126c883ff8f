"""Places of scores: a histogram, and what it says about where a cut lies."""

import tilelang.language as T

from tilelang_ops.common.cuda_noise import keep
from tilelang_ops.common.cuda_rows.row import (
    ABOVE_K,
    BINS,
    HIGH_PLACE,
    K_PLACE,
    LIST_SIZE,
    LOW_PLACE,
    LOWEST,
    Row,
    added,
    larger,
    load_group,
    load_group_again,
    load_sample,
    reduce_block,
    scan_block,
    start_watch,
    walk_again,
    watch,
    whole_branch,
)

FINEST, COARSEST = 64.0, 2.0  # places per unit of a score
REFERENCE_PLACE = 1536.0
SAMPLED = 4
SIGMAS = 4.0  # of the error of a guess from counts of a sample
MAGIC = 8388608.0  # 2^23: a float from here on is an integer


class CutRow(Row):
    """A row that is truncated; arguments are those of `Row`."""

    def __init__(self, *args):
        super().__init__(*args)
        self.unroll_guess = self.unroll  # of the walk for the list of a guess
        # Equal in all threads, which write them themselves, so that they are not held in registers.
        self.bound_of_list = T.alloc_shared((1,), "float32")  # no logit below it is listed by `look`
        self.least_listed = T.alloc_shared((1,), "float32")  # scores above it are
        self.mass_top = T.alloc_shared((1,), "int64")  # of the list of `look`
        self.doubt = T.alloc_shared((1,), "int64")  # bound of the error of comparisons of masses
        self.is_near = T.alloc_shared((1,), "int32")  # float32 masses of `look` are of use
        self.is_open = T.alloc_shared((1,), "int32")  # tokens below the place `low` may stay
        self.sure_cut = T.alloc_shared((1,), "uint64")  # of those that stay whatever the error
        self.width = T.alloc_shared((1,), "float32")  # of a place, a power of two as its inverse `unit`
        self.places = T.alloc_local((4,), "float32")
        self.origin = T.alloc_shared((1,), "float32")  # of places
        self.unit = T.alloc_shared((1,), "float32")  # places per unit of a score
        # A survey lists the places low ... high, and k_place where top-k is on; none of them is below lowest.
        self.low, self.high, self.k_place, self.lowest = (T.alloc_shared((1,), "float32") for _ in range(4))
        self.peak = T.alloc_shared((1,), "float32")
        self.floor = T.alloc_shared((1,), "float32")
        self.cut = T.alloc_shared((1,), "uint64")
        self.mass_all = T.alloc_shared((1,), "int64")
        self.mass_above = T.alloc_shared((1,), "int64")  # of tokens above the place `high`
        self.sum_all, self.sum_above = T.alloc_local((1,), "int64"), T.alloc_local((1,), "int64")
        self.near_above = T.alloc_local((1,), "float32")
        self.is_exact = T.alloc_shared((1,), "int32")  # whether a survey sums integers
        self.weighs = T.alloc_local((1,), "int32")  # what `bisect_cut` is at
        self.is_found = T.alloc_local((1,), "int32")
        self.stage = T.alloc_shared((1,), "int32")
        self.slope, self.offset = T.alloc_local((1,), "float32"), T.alloc_local((1,), "float32")
        self.most_listed = T.alloc_shared((1,), "float32")  # scores above it are not; no place is then
        # Of `rivals`: best of groups of threads, and the rivals that a walk asks about.
        self.leads = T.alloc_shared((16,), "uint32")
        self.heights = T.alloc_shared((16,), "uint32")
        self.asked_token = T.alloc_shared((4,), "int32")
        self.asked_score = T.alloc_shared((4,), "float32")
        self.asked_above = T.alloc_shared((4,), "float32")  # the next larger float32
        self.asked_ties = T.alloc_shared((4,), "float32")
        self.asked_mass = T.alloc_shared((4,), "int64")
        self.asked_group = T.alloc_local((4,), "int32")
        self.asked_least, self.asked_more = T.alloc_local((4,), "float32"), T.alloc_local((4,), "float32")
        self.asked_sum = T.alloc_local((4,), "float32")
        self.above = None  # macro (r, base, group) for groups with such scores
        self.slot = T.alloc_local((1,), "int32")


@T.macro
def place(r, score):
    """2^23 + the place of a score, as a float: it never falls where the score rises."""
    at = T.ieee_fmaf(score, r.unit[0], r.origin[0])
    return keep(T.min(T.max(at, T.float32(0.0)), T.float32(BINS - 1.0)) + T.float32(MAGIC))


@T.macro
def _choose_unit(r, reference):
    """Halves r.unit until half of the sample in r.raw, impossible tokens aside, is above the lowest place."""
    counts = T.alloc_local((1,), "int32")  # tokens above the lowest place * 2^16 + all, fewer than 2^16
    unit = T.alloc_local((1,), "float32")
    width = T.alloc_local((1,), "float32")
    unit[0] = 2.0 * FINEST
    width[0] = 0.5 / FINEST
    counts[0] = 1
    while unit[0] >= T.float32(COARSEST) and (counts[0] >> 16) * 2 < (counts[0] & 0xFFFF):
        unit[0] = unit[0] * T.float32(0.5)
        width[0] = width[0] * T.float32(2.0)
        counts[0] = 0
        for j in T.unroll(4):
            score = r.raw[j] * r.scale[0]
            if score >= T.float32(LOWEST):
                is_above = (reference - score) * unit[0] < T.float32(REFERENCE_PLACE)
                counts[0] = counts[0] + T.if_then_else(is_above, 65537, 1)
        reduce_block(r, counts, added)
    r.unit[0] = unit[0]
    r.width[0] = width[0]


@T.macro
def start_places(r):
    """The reference, places and the sample in r.raw."""
    load_sample(r, r)
    r.raw_peak[0] = r.reference[0]
    if r.reference[0] <= T.float32(LOWEST):
        # Nothing possible in the sample.
        start_watch(r)
        walk_again(r, watch)
        reduce_block(r, r.raw_peak, larger)
        r.reference[0] = r.raw_peak[0]
    else:
        whole_branch(r)
    load_group_again(r, (r.thread * r.groups) // r.num_threads, r.raw)
    r.reference[0] = T.min(T.max(r.reference[0] * r.scale[0], T.float32(LOWEST)), T.float32(-LOWEST))
    _choose_unit(r, r.reference[0])
    r.origin[0] = T.float32(REFERENCE_PLACE) - r.unit[0] * r.reference[0]


@T.macro
def clear_counts(r):
    for i in T.serial(BINS // r.num_threads):
        r.counts[i * r.num_threads + r.thread] = 0
    T.sync_threads()


@T.macro
def count_group(r, base):
    for j in T.unroll(4):
        at = place(r, r.scores[base + j])
        if at > T.float32(MAGIC):
            T.atomic_add(r.counts[T.reinterpret(at, "int32") & (BINS - 1)], 1)


@T.macro
def _count_group(r, base, group):
    count_group(r, base)


@T.macro
def count_places(r):
    """Counts the tokens in every place but the lowest."""
    clear_counts(r)
    walk_again(r, _count_group)
    T.sync_threads()


@T.macro
def find_rank(r, rank):
    """The place of the token of a rank >= 1, by the counts, and how many are above it; 0 below all places."""
    own = T.alloc_local((1,), "int64")
    before = T.alloc_local((1,), "int64")
    total = T.alloc_local((1,), "int64")
    per_thread = BINS // r.num_threads
    first = BINS - 1 - r.thread * per_thread
    own[0] = 0
    for j in T.unroll(per_thread, unroll_factor=1):
        own[0] = own[0] + T.cast(r.counts[first - j], "int64")
    scan_block(r, own, before, total)
    if r.thread == 0:
        r.ints[K_PLACE] = 0
        r.ints[ABOVE_K] = T.cast(total[0], "int32")
    else:
        whole_branch(r)
    T.sync_threads()
    for j in T.unroll(per_thread, unroll_factor=1):
        here = T.cast(r.counts[first - j], "int64")
        if before[0] < rank and before[0] + here >= rank:
            r.ints[K_PLACE] = first - j
            r.ints[ABOVE_K] = T.cast(before[0], "int32")
        else:
            whole_branch(r)
        before[0] = before[0] + here
    T.sync_threads()


@T.macro
def _count_sample(r):
    """Counts the places of the tokens below the list of `look`, of one in `SAMPLED` runs of 128 tokens."""
    num_warps = r.num_threads // 32
    runs = -(-r.groups // (32 * SAMPLED))
    clear_counts(r)
    for step in T.serial(-(-runs // (r.unroll * num_warps))):
        for u in T.unroll(r.unroll):
            run = (step * r.unroll + u) * num_warps + r.thread // 32
            load_group(r, (run * SAMPLED + run % SAMPLED) * 32 + r.thread % 32, 4 * u, r.raw)
        for u in T.unroll(r.unroll):
            for j in T.unroll(4):
                at = place(r, r.raw[4 * u + j] * r.scale[0])
                if at > T.float32(MAGIC) and r.raw[4 * u + j] * r.scale[0] <= r.least_listed[0]:
                    T.atomic_add(r.counts[T.reinterpret(at, "int32") & (BINS - 1)], 1)
    T.sync_threads()


@T.macro
def _guess_ends(r, own, before, least, most, anchor):
    """The places where running sums of place masses (2^30) pass `least` and `most`."""
    per_thread = BINS // r.num_threads
    first = BINS - 1 - r.thread * per_thread
    if r.thread == 0:
        r.ints[HIGH_PLACE] = 0
        r.ints[LOW_PLACE] = 0
    else:
        whole_branch(r)
    T.sync_threads()
    own[0] = before[0]
    for j in T.unroll(per_thread, unroll_factor=1):
        mass = T.cast(r.counts[first - j], "float32") * _place_mass(r, first - j, anchor)
        here = T.cast(mass * T.float32(2.0**30), "int64")
        if own[0] <= least and own[0] + here > least:
            r.ints[HIGH_PLACE] = first - j
        if own[0] <= most and own[0] + here > most:
            r.ints[LOW_PLACE] = first - j
        own[0] = own[0] + here
    T.sync_threads()


@T.macro
def _sum_places(r, own, before, total, anchor):
    """Masses (2^30) of the places above this thread's, and of all."""
    per_thread = BINS // r.num_threads
    first = BINS - 1 - r.thread * per_thread
    own[0] = 0
    for j in T.unroll(per_thread, unroll_factor=1):
        mass = T.cast(r.counts[first - j], "float32") * _place_mass(r, first - j, anchor)
        own[0] = own[0] + T.cast(mass * T.float32(2.0**30), "int64")
    scan_block(r, own, before, total)


@T.macro
def guess_from_sample(r):
    """Where the nucleus should end below the list of `look`, by the masses of the tokens that it counted."""
    own = T.alloc_local((1,), "int64")
    before = T.alloc_local((1,), "int64")
    total = T.alloc_local((1,), "int64")
    square_above = T.alloc_local((1,), "float32")
    square_below = T.alloc_local((1,), "float32")
    num_listed = T.alloc_local((1,), "int32")
    per_thread = BINS // r.num_threads
    first = BINS - 1 - r.thread * per_thread
    anchor = T.ieee_fmaf(r.least_listed[0], r.unit[0], r.origin[0])
    _count_sample(r)
    _sum_places(r, own, before, total, anchor)
    top = T.cast(r.mass_top[0], "float32") * T.float32(2.0**-40)
    whole = T.cast(r.mass_all[0], "float32") * T.float32(2.0**-40)
    below = T.max(whole - top, T.float32(1e-30))
    share = T.min(T.max((r.top_p[0] * whole - top) / below, T.float32(0.0)), T.float32(1.0))
    goal = keep(share * T.cast(total[0], "float32"))
    _guess_ends(r, own, before, T.cast(goal, "int64"), T.cast(goal, "int64"), anchor)
    # The error of a quotient of sums over a sample.
    square_above[0] = 0.0
    square_below[0] = 0.0
    for j in T.unroll(per_thread, unroll_factor=1):
        mass = _place_mass(r, first - j, anchor)
        square = T.cast(r.counts[first - j], "float32") * mass * mass
        if first - j > r.ints[LOW_PLACE]:
            square_above[0] = square_above[0] + square
        else:
            square_below[0] = square_below[0] + square
    reduce_block(r, square_above, added)
    reduce_block(r, square_below, added)
    rest = T.float32(1.0) - share
    variance = rest * rest * square_above[0] + share * share * square_below[0]
    margin = T.cast(total[0], "float32") * T.float32(1e-4) + T.sqrt(variance) * T.float32(SIGMAS * 2.0**30)
    least = T.cast(T.max(goal - margin, T.float32(0.0)), "int64")
    _guess_ends(r, own, before, least, T.cast(goal + margin, "int64"), anchor)
    # Where all that may stay fits into the list, nothing is above it.
    num_listed[0] = 0
    for j in T.unroll(per_thread, unroll_factor=1):
        if first - j >= r.ints[LOW_PLACE]:
            num_listed[0] = num_listed[0] + SAMPLED * r.counts[first - j]
    reduce_block(r, num_listed, added)
    fits = num_listed[0] + r.ints[LIST_SIZE] <= r.capacity * 3 // 4
    most_listed = T.alloc_local((1,), "float32")
    most_listed[0] = (T.cast(r.ints[HIGH_PLACE], "float32") + T.float32(0.5) - r.origin[0]) * r.width[0]
    if fits or least <= T.int64(0) or r.ints[HIGH_PLACE] == 0:
        most_listed[0] = T.infinity("float32")
    r.most_listed[0] = most_listed[0]
    edge = keep((T.cast(r.ints[LOW_PLACE], "float32") - T.float32(0.5) - r.origin[0]) * r.width[0])
    set_bound(r, T.min(edge, most_listed[0]) / r.scale[0], r.ints[LOW_PLACE] > 0)


@T.macro
def set_bound(r, logit, is_given):
    """Sets the bound of lists, or none."""
    bound = keep(T.max(logit, T.float32(LOWEST)))
    T.sync_threads()
    r.bound_of_list[0] = T.if_then_else(is_given, bound, T.float32(LOWEST))
    r.least_listed[0] = T.if_then_else(is_given, bound * r.scale[0], -T.infinity("float32"))
    if r.thread == 0:
        r.ints[LIST_SIZE] = 0
    T.sync_threads()


@T.macro
def guess_from_counts(r):
    """Finds the k-th token's place, exactly, and the places in which the nucleus should end."""
    own = T.alloc_local((1,), "int64")
    before = T.alloc_local((1,), "int64")
    total = T.alloc_local((1,), "int64")
    spread = T.alloc_local((1,), "float32")
    peak_at = T.ieee_fmaf(r.peak[0], r.unit[0], r.origin[0])
    per_thread = BINS // r.num_threads
    first = BINS - 1 - r.thread * per_thread
    lowest_place = T.cast(place(r, r.floor[0]) - T.float32(MAGIC), "int32")
    if r.thread == 0:
        r.ints[HIGH_PLACE] = 0
        r.ints[LOW_PLACE] = 0
        r.ints[K_PLACE] = 0
        r.ints[ABOVE_K] = 0
    else:
        whole_branch(r)
    T.sync_threads()
    if r.top_k[0] > 0:
        find_rank(r, T.cast(r.top_k[0], "int64"))
    else:
        whole_branch(r)
    bottom = T.max(r.ints[K_PLACE], lowest_place)
    if r.top_p[0] < T.float32(1.0):
        _sum_places(r, own, before, total, peak_at)
        spread[0] = 0.0
        for j in T.unroll(per_thread, unroll_factor=1):
            mass = _place_mass(r, first - j, peak_at)
            spread[0] = spread[0] + T.cast(r.counts[first - j], "float32") * mass * mass
        reduce_block(r, spread, added)
        if r.thread == 0:
            r.longs[0] = total[0]
        T.sync_threads()
        if bottom <= first and bottom > first - per_thread:
            own[0] = before[0]
            for j in T.serial(first - bottom):
                mass = T.cast(r.counts[first - j], "float32") * _place_mass(r, first - j, peak_at)
                own[0] = own[0] + T.cast(mass * T.float32(2.0**30), "int64")
            inside = T.alloc_local((1,), "int32")
            inside[0] = r.counts[bottom]
            if r.top_k[0] > 0 and bottom == r.ints[K_PLACE]:
                inside[0] = T.min(inside[0], r.top_k[0] - r.ints[ABOVE_K])
            mass = T.cast(inside[0], "float32") * _place_mass(r, bottom, peak_at)
            r.longs[0] = own[0] + T.cast(mass * T.float32(2.0**30), "int64")
        else:
            whole_branch(r)
        T.sync_threads()
        whole = T.cast(r.longs[0], "float32")
        # A place's masses spread over e^(1/64); a token in it is off by 1/64/sqrt(12), independently.
        margin = whole * T.float32(1e-4) + T.sqrt(spread[0]) * T.float32(2.0 * 2.0**30 / 3.46) * r.width[0]
        least = T.cast(T.max(r.top_p[0] * whole - margin, T.float32(0.0)), "int64")
        _guess_ends(r, own, before, least, T.cast(r.top_p[0] * whole + margin, "int64"), peak_at)
    else:
        whole_branch(r)


@T.macro
def _place_mass(r, at, anchor):
    """exp of a place's distance from the place `anchor`."""
    return T.__exp(T.min(T.cast(at, "float32") - anchor, T.float32(0.0)) * r.width[0])
