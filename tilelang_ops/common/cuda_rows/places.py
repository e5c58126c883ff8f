"""Places: a histogram of a row's scores, and what it says about where a truncation cuts."""

import tilelang.language as T

from tilelang_ops.common.cuda_noise import keep
from tilelang_ops.common.cuda_rows.row import (
    ABOVE_K,
    BINS,
    HIGH_PLACE,
    K_PLACE,
    LOW_PLACE,
    LOWEST,
    added,
    finish_watch,
    larger,
    largest,
    load_group,
    reduce_block,
    scan_block,
    start_watch,
    walk,
    watch,
)

FINEST, COARSEST = 64.0, 2.0  # places per unit of a score
REFERENCE_PLACE = 1536.0
MAGIC = 8388608.0  # 2^23: a float from here on is an integer


@T.macro
def place(r, score):
    """2^23 + the place of a score, as a float: it never falls where the score rises."""
    at = T.ieee_fmaf(score, r.unit[0], r.origin[0])
    return keep(T.min(T.max(at, T.float32(0.0)), T.float32(BINS - 1.0)) + T.float32(MAGIC))


@T.macro
def watch_and_count(r, base, group):
    watch(r, base, group)
    for j in T.unroll(4):
        at = place(r, r.scores[base + j])
        if at > T.float32(MAGIC):
            T.atomic_add(r.counts[T.reinterpret(at, "int32") & (BINS - 1)], 1)


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
