"""Rows of scores, one block of threads each: walks over the row, reductions, and the cut of a truncation.

A row is read in groups of four tokens; a walk hands every group to a macro. Sums that decide something are
integers and maxima are of whole keys, so no order of threads shows.

Keys. `pack` makes one integer of a score and its token id: a larger score is a larger key, and of equal
scores the lower id. A truncation keeps the tokens whose key is at least its cut. Nothing is sorted but a
short list:

    walk 1   the largest score, and how many tokens fall into each of 4096 places (`place`), 64 to a unit
             of score or fewer, around a sampled reference
    counts   say in which place the k-th token is, exactly, and, with exp(place) for a mass, about where the
             nucleus ends
    walk 2   the masses of all tokens and of those above the places in question; tokens in those places are
             collected
    list     is sorted, and its prefix sums of masses give the cut, or that the guess was wrong: then wider
             places are tried once
    bisect   finds a cut that the list has no room for, a walk per bit of a key

In walk 2 a draw is content with masses in float32, of known error: it draws among all that may stay, and only
where the winner is not sure to stay, a matter of chances of 2^-13, the row is walked again for the integers.
The masses are those of `truncate_scores`' reference: every step is rounded once, so programs are built with
`OPTIONS`.
"""

import tilelang.language as T

from tilelang_ops.common.cuda_noise import EXACT, keep, noise_exact, noise_near, philox_words

BINS = 4096
# Options of programs made of these macros: they synchronise by themselves.
OPTIONS = {**EXACT, "tl.disable_thread_storage_sync": True, "tl.disable_shared_memory_reuse": True}

FINEST, COARSEST = 64.0, 2.0  # places per unit of a score
REFERENCE_PLACE = 1536.0
RETRY_PLACES = 4
MAGIC = 8388608.0  # 2^23: a float from here on is an integer
LOWEST = -3.4028234663852886e38  # the lowest finite float
MASS_POLYNOMIAL = (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
# Slots of `Row.ints`.
LIST_SIZE, QUEUE_SIZE, K_PLACE, ABOVE_K, HIGH_PLACE, LOW_PLACE = range(6)


class Row:
    """A block's row: where its scores are, and the memory that the macros below share.

    Args:
        logits: [n, vocab] float32, contiguous.
        row: the block's.
        vocab, num_threads, capacity: compile-time; capacity of the list, a power of two.
        unroll: groups of a thread that are loaded at once.
        out: where a walk may write, None for nowhere.
    """

    def __init__(self, logits, row, vocab, num_threads, capacity, unroll=1, out=None):
        self.out = out
        self.logits, self.row, self.vocab, self.num_threads = logits, row, vocab, num_threads
        self.capacity = capacity
        self.unroll = unroll
        self.groups = -(-vocab // 4)
        self.id_bits = max(1, (vocab - 1).bit_length())
        self.thread = T.get_thread_binding(0)
        self.warps = tuple(range(1, num_threads // 32))
        self.counts = T.alloc_shared((BINS,), "int32")
        self.list = T.alloc_shared((max(1, capacity),), "uint64")
        self.queue_capacity = max(1, min(capacity, 1024))
        self.queue = T.alloc_shared((self.queue_capacity,), "int32")
        self.ints = T.alloc_shared((8,), "int32")
        self.longs = T.alloc_shared((2,), "int64")
        self.bound = T.alloc_shared((1,), "uint32")  # ordered bits of a lower bound of the winner
        self.scratch = {
            d: T.alloc_shared((32,), d) for d in ("float32", "float64", "int32", "int64", "uint64")
        }
        # In shared memory, so that the keys of Philox's rounds are not held in registers during a walk.
        self.seed, self.index = T.alloc_shared((1,), "int64"), T.alloc_shared((1,), "int64")
        self.domain = T.alloc_local((1,), "int32")
        self.top_k = T.alloc_local((1,), "int32")  # <= 0: off
        self.top_p = T.alloc_local((1,), "float32")  # >= 1: off
        self.scale = T.alloc_local((1,), "float32")
        self.raw = T.alloc_local((4 * unroll,), "float32")
        self.scores = T.alloc_local((4 * unroll,), "float32")
        self.places = T.alloc_local((4,), "float32")
        self.words = T.alloc_local((4,), "uint32")
        self.near = T.alloc_local((4,), "float32")
        self.is_broken = T.alloc_local((1,), "int32")  # NaN in the row
        self.raw_peak = T.alloc_local((1,), "float32")
        self.peak = T.alloc_local((1,), "float32")  # largest score
        self.floor = T.alloc_local((1,), "float32")  # scores from here on pass min-p
        self.origin = T.alloc_local((1,), "float32")  # of places
        self.unit = T.alloc_local((1,), "float32")  # places per unit of a score
        self.low, self.high, self.k_place = (T.alloc_local((1,), "float32") for _ in range(3))
        self.mass_above, self.mass_all = (T.alloc_local((1,), "int64") for _ in range(2))
        self.near_above, self.near_all = (T.alloc_local((1,), "float32") for _ in range(2))
        self.doubt = T.alloc_local((1,), "int64")  # bound of the error of comparisons of masses
        self.is_exact = T.alloc_local((1,), "int32")  # whether walk 2 sums integers
        self.sure_cut = T.alloc_local((1,), "uint64")  # of those that stay whatever the error
        self.threshold = T.alloc_local((1,), "int64")
        self.cut = T.alloc_local((1,), "uint64")
        self.limit = T.alloc_local((1,), "uint64")  # of `bisect`
        self.best = T.alloc_local((1,), "uint64")
        self.count = T.alloc_local((1,), "int64")
        self.total = T.alloc_local((1,), "float64")
        self.weighs = T.alloc_local((1,), "int32")  # what `bisect_cut` is at
        self.is_found = T.alloc_local((1,), "int32")


@T.macro
def ordered(x):
    """uint32 with the order of a float32; one value for both zeros."""
    value = keep(x)
    bits = keep(T.reinterpret(T.if_then_else(value == T.float32(0.0), T.float32(0.0), value), "uint32"))
    return T.if_then_else(T.reinterpret(bits, "int32") < 0, ~bits, bits | T.uint32(1 << 31))


@T.macro
def unordered(key):
    """The float32 of `ordered` bits."""
    is_positive = T.reinterpret(key, "int32") < 0
    return T.reinterpret(T.if_then_else(is_positive, key & T.uint32(0x7FFFFFFF), ~key), "float32")


@T.macro
def pack(r, score, token):
    """Key of a score and its token id; the id's bits are inverted."""
    low = T.cast((1 << r.id_bits) - 1 - token, "uint64")
    return keep((T.cast(ordered(score), "uint64") << T.uint64(r.id_bits)) | low)


def packed_token(r, key):
    """Token id of a key."""
    mask = (1 << r.id_bits) - 1
    return mask - T.cast(key & T.uint64(mask), "int32")


def packed_score(r, key):
    """Score of a key."""
    return unordered(T.cast(key >> T.uint64(r.id_bits), "uint32"))


@T.macro
def place(r, score):
    """2^23 + the place of a score, as a float: it never falls where the score rises."""
    at = T.ieee_fmaf(score, r.unit[0], r.origin[0])
    return keep(T.min(T.max(at, T.float32(0.0)), T.float32(BINS - 1.0)) + T.float32(MAGIC))


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
def reduce_block(r, value, combine):
    """value[0] of all threads combined, in every thread; the order is fixed."""
    scratch = r.scratch[str(value.dtype)]
    for offset in (16, 8, 4, 2, 1):
        other = T.shfl_xor(value[0], offset)
        value[0] = combine(value[0], other)
    if r.thread % 32 == 0:
        scratch[r.thread // 32] = value[0]
    T.sync_threads()
    value[0] = scratch[0]
    for warp in r.warps:
        value[0] = combine(value[0], scratch[warp])
    T.sync_threads()


def larger(a, b):
    """The larger of two."""
    return T.max(a, b)


def smaller(a, b):
    """The smaller of two."""
    return T.min(a, b)


def added(a, b):
    """The sum of two."""
    return a + b


@T.macro
def scan_block(r, value, before, total):
    """Sums of value[0] (int64) over the threads before this one, and over all."""
    inclusive = T.alloc_local((1,), "int64")
    inclusive[0] = value[0]
    for offset in (1, 2, 4, 8, 16):
        other = T.shfl_up(inclusive[0], offset)
        if r.thread % 32 >= offset:
            inclusive[0] = inclusive[0] + other
    if r.thread % 32 == 31:
        r.scratch["int64"][r.thread // 32] = inclusive[0]
    T.sync_threads()
    before[0] = inclusive[0] - value[0]
    total[0] = r.scratch["int64"][0]
    if r.thread // 32 > 0:
        before[0] = before[0] + r.scratch["int64"][0]
    for warp in r.warps:
        total[0] = total[0] + r.scratch["int64"][warp]
        if r.thread // 32 > warp:
            before[0] = before[0] + r.scratch["int64"][warp]
    T.sync_threads()


@T.macro
def load_group(r, group, base):
    """Logits of a group into raw[base : base + 4]; -inf behind the last token."""
    if r.vocab % 4 == 0:
        if group < r.groups:
            for j in T.vectorized(4):
                r.raw[base + j] = r.logits[r.row, group * 4 + j]
        else:
            for j in T.unroll(4):
                r.raw[base + j] = -T.infinity("float32")
    else:
        for j in T.unroll(4):
            r.raw[base + j] = -T.infinity("float32")
            if group * 4 + j < r.vocab:
                r.raw[base + j] = r.logits[r.row, group * 4 + j]


@T.macro
def walk(r, body):
    """Calls body(r, base, group) for every group of the row, its scores in r.scores[base : base + 4]."""
    for step in T.serial(-(-r.groups // (r.unroll * r.num_threads))):
        for u in T.unroll(r.unroll):
            load_group(r, (step * r.unroll + u) * r.num_threads + r.thread, 4 * u)
        for u in T.unroll(r.unroll):
            for j in T.unroll(4):
                r.scores[4 * u + j] = r.raw[4 * u + j] * r.scale[0]
            body(r, 4 * u, (step * r.unroll + u) * r.num_threads + r.thread)


def largest(buffer, base):
    """Of four numbers."""
    return T.max(T.max(buffer[base], buffer[base + 1]), T.max(buffer[base + 2], buffer[base + 3]))


@T.macro
def watch(r, base, group):
    r.raw_peak[0] = T.max(r.raw_peak[0], largest(r.raw, base))
    # NaN by its bits: the compiler takes x != x for false.
    total = (r.raw[base] + r.raw[base + 1]) + (r.raw[base + 2] + r.raw[base + 3])
    if (T.reinterpret(total, "int32") & 0x7FFFFFFF) > 0x7F800000:
        r.is_broken[0] = 1


@T.macro
def watch_and_count(r, base, group):
    watch(r, base, group)
    for j in T.unroll(4):
        at = place(r, r.scores[base + j])
        if at > T.float32(MAGIC):
            T.atomic_add(r.counts[T.reinterpret(at, "int32") & (BINS - 1)], 1)


@T.macro
def finish_watch(r):
    reduce_block(r, r.raw_peak, larger)
    reduce_block(r, r.is_broken, larger)
    r.peak[0] = r.raw_peak[0] * r.scale[0]


@T.macro
def start_watch(r):
    r.raw_peak[0] = -T.infinity("float32")
    r.is_broken[0] = 0


@T.macro
def _choose_unit(r, reference):
    """Halves r.unit until half of the sample in r.raw, impossible tokens aside, is above the lowest place."""
    num_above = T.alloc_local((1,), "int32")
    num_all = T.alloc_local((1,), "int32")
    num_above[0] = 0
    num_all[0] = 1
    while num_above[0] * 2 < num_all[0]:
        num_above[0] = 0
        num_all[0] = 0
        for j in T.unroll(4):
            score = r.raw[j] * r.scale[0]
            if score >= T.float32(LOWEST):
                num_all[0] = num_all[0] + 1
                if (reference - score) * r.unit[0] < T.float32(REFERENCE_PLACE):
                    num_above[0] = num_above[0] + 1
        reduce_block(r, num_above, added)
        reduce_block(r, num_all, added)
        if num_above[0] * 2 < num_all[0]:
            r.unit[0] = r.unit[0] * T.float32(0.5)
        if r.unit[0] < T.float32(COARSEST):
            num_all[0] = 0


@T.macro
def count_places(r):
    """Watches the row, and counts the tokens in every place but the lowest."""
    # The reference: the best of a sample of the row, of the whole row where that is impossible.
    start_watch(r)
    load_group(r, (r.thread * r.groups) // r.num_threads, 0)
    r.raw_peak[0] = largest(r.raw, 0)
    reduce_block(r, r.raw_peak, larger)
    if r.raw_peak[0] == -T.infinity("float32"):
        walk(r, watch)
        reduce_block(r, r.raw_peak, larger)
        load_group(r, (r.thread * r.groups) // r.num_threads, 0)
    reference = T.max(r.raw_peak[0] * r.scale[0], T.float32(LOWEST))
    r.unit[0] = T.float32(FINEST)
    _choose_unit(r, reference)
    r.origin[0] = T.float32(REFERENCE_PLACE) - r.unit[0] * reference
    for i in T.serial(BINS // r.num_threads):
        r.counts[i * r.num_threads + r.thread] = 0
    T.sync_threads()
    start_watch(r)
    walk(r, watch_and_count)
    finish_watch(r)


@T.macro
def guess_places(r, lowest_place):
    """Finds the k-th token's place, exactly, and the places in which the nucleus should end.

    lowest_place: of the lowest score that passes min-p.
    """
    own = T.alloc_local((1,), "int64")
    before = T.alloc_local((1,), "int64")
    total = T.alloc_local((1,), "int64")
    peak_at = T.ieee_fmaf(r.peak[0], r.unit[0], r.origin[0])
    spread = T.alloc_local((1,), "float32")
    per_thread = BINS // r.num_threads
    first = BINS - 1 - r.thread * per_thread
    if r.thread == 0:
        r.ints[K_PLACE] = 0
        r.ints[ABOVE_K] = 0
        r.ints[HIGH_PLACE] = 0
        r.ints[LOW_PLACE] = 0
    own[0] = 0
    for j in T.serial(per_thread):
        own[0] = own[0] + T.cast(r.counts[first - j], "int64")
    scan_block(r, own, before, total)
    if r.top_k[0] > 0:
        for j in T.serial(per_thread):
            here = T.cast(r.counts[first - j], "int64")
            if before[0] < r.top_k[0] and before[0] + here >= r.top_k[0]:
                r.ints[K_PLACE] = first - j
                r.ints[ABOVE_K] = T.cast(before[0], "int32")
            before[0] = before[0] + here
        if total[0] < r.top_k[0] and r.thread == 0:
            r.ints[ABOVE_K] = T.cast(total[0], "int32")
    T.sync_threads()
    if r.top_p[0] < T.float32(1.0):
        own[0] = 0
        spread[0] = 0.0
        for j in T.serial(per_thread):
            here = T.cast(r.counts[first - j], "float32")
            mass = here * _place_mass(r, first - j, peak_at)
            own[0] = own[0] + T.cast(mass * T.float32(2.0**30), "int64")
            if here > T.float32(0.0):
                spread[0] = spread[0] + mass * mass / here
        scan_block(r, own, before, total)
        reduce_block(r, spread, added)
        bottom = T.max(r.ints[K_PLACE], lowest_place)
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
        T.sync_threads()
        whole = T.cast(r.longs[0], "float32")
        # A place's masses spread over e^(1/64); a token in it is off by 1/64/sqrt(12), independently.
        margin = whole * T.float32(1e-4) + T.sqrt(spread[0]) * T.float32(2.0 * 2.0**30 / 3.46) / r.unit[0]
        least = T.cast(T.max(r.top_p[0] * whole - margin, T.float32(0.0)), "int64")
        most = T.cast(r.top_p[0] * whole + margin, "int64")
        for j in T.serial(per_thread):
            mass = T.cast(r.counts[first - j], "float32") * _place_mass(r, first - j, peak_at)
            here = T.cast(mass * T.float32(2.0**30), "int64")
            if before[0] <= least and before[0] + here > least:
                r.ints[HIGH_PLACE] = first - j
            if before[0] <= most and before[0] + here > most:
                r.ints[LOW_PLACE] = first - j
            before[0] = before[0] + here
        T.sync_threads()


@T.macro
def _place_mass(r, at, peak_at):
    """exp of a place's distance from the best score's."""
    return T.__exp(T.min(T.cast(at, "float32") - peak_at, T.float32(0.0)) / r.unit[0])


@T.macro
def set_stream(r, seed, index, domain):
    """The noise of the row's draw."""
    r.domain[0] = domain
    if r.thread == 0:
        r.seed[0] = seed
        r.index[0] = index
    T.sync_threads()


@T.macro
def keep_for_draw(r, base, group, lowest):
    """Queues those tokens of a group that may win a draw among the ones whose place is above `lowest`."""
    for j in T.unroll(4):
        if not (r.scores[base + j] >= r.floor[0] and r.places[j] > lowest):
            r.scores[base + j] = -T.infinity("float32")
    philox_words(r.words, group, r.seed[0], r.index[0], r.domain[0])
    fewest = T.min(T.min(r.words[0], r.words[1]), T.min(r.words[2], r.words[3]))
    # A winner has -log(-log(1 - u)) >= bound - score; as -log(1 - u) >= u, u is at most exp(score - bound).
    most = T.__exp(largest(r.scores, base) - _bound(r)) * T.float32(2.0**32)
    if T.cast(fewest, "float32") <= most:
        for j in T.unroll(4):
            r.near[j] = r.scores[base + j] + noise_near(r.words[j])
        T.atomic_max(r.bound[0], ordered(largest(r.near, 0)))
        least = _bound(r)
        for j in T.unroll(4):
            if r.near[j] >= least and r.scores[base + j] >= r.floor[0]:
                at = T.atomic_add(r.ints[QUEUE_SIZE], 1, return_prev=True)
                if at < r.queue_capacity:
                    r.queue[at] = group * 4 + j


@T.macro
def _bound(r):
    """Below the winner's perturbed score, by more than all rounding."""
    bound = unordered(r.bound[0])
    return bound - (T.float32(1e-3) + T.float32(1e-6) * T.abs(bound))


@T.macro
def start_draw(r):
    """Before the first `keep_for_draw`; the caller synchronises."""
    if r.thread == 0:
        r.bound[0] = ordered(-T.infinity("float32"))
        r.ints[QUEUE_SIZE] = 0


@T.macro
def try_token(r, score, token):
    """Enters one token into this thread's best, by its exact perturbed score."""
    philox_words(r.words, token >> 2, r.seed[0], r.index[0], r.domain[0])
    word = T.alloc_local((1,), "uint32")
    word[0] = r.words[0]
    for j in (1, 2, 3):
        if (token & 3) == j:
            word[0] = r.words[j]
    key = pack(r, score + noise_exact(word[0]), token)
    r.best[0] = T.max(r.best[0], key)


@T.macro
def redraw_group(r, base, group):
    """Of a walk that tries every token of a group that stays and may win."""
    if largest(r.scores, base) >= r.floor[0]:
        philox_words(r.words, group, r.seed[0], r.index[0], r.domain[0])
        for j in T.unroll(4):
            kept = pack(r, r.scores[base + j], group * 4 + j) >= r.cut[0]
            if r.scores[base + j] >= r.floor[0] and kept:
                r.near[j] = r.scores[base + j] + noise_near(r.words[j])
                if r.near[j] >= _bound(r):
                    T.atomic_max(r.bound[0], ordered(r.near[j]))
                    key = pack(r, r.scores[base + j] + noise_exact(r.words[j]), group * 4 + j)
                    r.best[0] = T.max(r.best[0], key)


@T.macro
def _score_at(r, token):
    return r.logits[r.row, token] * r.scale[0]


@T.macro
def finish_draw(r, redraw=redraw_group, score_at=_score_at):
    """The winner among the queued tokens, as a key in r.best.

    redraw: macro of a walk over all tokens, for a full queue.  score_at: (r, token) -> the score of a token.
    """
    at = T.alloc_local((1,), "int32")
    r.best[0] = T.uint64(0)
    T.sync_threads()
    if r.ints[QUEUE_SIZE] <= r.queue_capacity:
        at[0] = r.thread
        while at[0] < r.ints[QUEUE_SIZE]:
            token = r.queue[at[0]]
            try_token(r, keep(score_at(r, token)), token)
            at[0] = at[0] + r.num_threads
    else:
        walk(r, redraw)
    reduce_block(r, r.best, larger)


@T.macro
def draw_from_list(r):
    """Queues the tokens of the list that stay and may win."""
    at = T.alloc_local((1,), "int32")
    at[0] = r.thread
    while r.is_found[0] == 1 and at[0] < r.ints[LIST_SIZE]:
        key = r.list[at[0]]
        if key >= r.cut[0]:
            token = packed_token(r, key)
            philox_words(r.words, token >> 2, r.seed[0], r.index[0], r.domain[0])
            r.near[0] = noise_near(r.words[0])
            for j in (1, 2, 3):
                if (token & 3) == j:
                    r.near[0] = noise_near(r.words[j])
            r.near[0] = packed_score(r, key) + r.near[0]
            if r.near[0] >= _bound(r):
                T.atomic_max(r.bound[0], ordered(r.near[0]))
                slot = T.atomic_add(r.ints[QUEUE_SIZE], 1, return_prev=True)
                if slot < r.queue_capacity:
                    r.queue[slot] = token
        at[0] = at[0] + r.num_threads
    if r.is_found[0] == 0:
        # The cut came from `bisect_cut`: what the walks queued may have fallen out, so all is drawn anew.
        T.sync_threads()
        if r.thread == 0:
            r.ints[QUEUE_SIZE] = r.queue_capacity + 1
            r.bound[0] = ordered(-T.infinity("float32"))
        T.sync_threads()


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


@T.macro
def draw_group(r, base, group):
    """Of the walk of a draw from all tokens: watches, and queues what may win."""
    watch(r, base, group)
    if largest(r.scores, base) >= T.float32(LOWEST):
        keep_for_draw(r, base, group, T.float32(-1.0))


@T.macro
def start_plain_draw(r):
    """Before the walk of a draw from all tokens."""
    r.floor[0] = T.float32(LOWEST)
    r.cut[0] = T.uint64(0)
    for j in T.unroll(4):
        r.places[j] = T.float32(0.0)
    start_draw(r)
    start_watch(r)
    T.sync_threads()


@T.macro
def is_whole(r):
    """Whether the row has a possible token and nothing broken."""
    return r.is_broken[0] == 0 and T.abs(r.raw_peak[0]) <= T.float32(-LOWEST)
