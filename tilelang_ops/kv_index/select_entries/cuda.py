"""select_entries on CUDA: one reading of the scores, a block of threads for a row.

Scores become unsigned numbers of the same order. Columns whose number is above a cut are listed, in ascending
order; in the end the list shrinks to the k best. The cut is chosen from a sample of the row, so that somewhat
more than k columns are listed. Whatever it was, the result is exact:

    the list fills up      it shrinks to little more than the k best, and the cut rises to below the last of
                           them; what comes later and is not above it can never be chosen, since ties go to
                           the lower column
    it stays below k       the row is read again without a cut
"""

import torch
from tilelang.cuda import language as T
from torch import Tensor

from tilelang_ops.common.kernels import cuda_kernel
from tilelang_ops.kv_index.select_entries.bounds import (
    ABOVE_HIGH,
    ABOVE_LOW,
    BOUND,
    CUT,
    FLOOR,
    HIGH,
    LANES,
    LENGTH,
    LOW,
    MINUS_INFINITY,
    OF_OTHERS,
    SIDE,
    THREADS,
    WANTED,
    WARPS,
    find_bound,
    narrow,
    number_at,
    ordered,
    places_of,
    score_of,
    votes_on,
    warp_sum,
)

RUN = 4  # columns of a thread that lie together
RUNS = 2  # of them in a step
STEP = THREADS * RUN * RUNS
DEPTH = 2  # steps that are loaded ahead
KEEP = 2560  # columns that the list may have before a step
SAMPLE = 8  # columns of a thread
SPARE = 1024  # columns above k that are listed, about


@T.macro
def load(loaded, part, scores, row, width, step, warp, lane, vector):
    """A step's columns of this thread: of a warp they lie together, of a lane in runs."""
    for u in T.unroll(RUNS):
        column = step * STEP + ((warp * RUNS + u) * LANES + lane) * RUN
        if vector == RUN:
            if column < width:
                for v in T.vectorized(RUN):
                    loaded[(part * RUNS + u) * RUN + v] = scores[row, column // RUN, v]
            else:
                for v in T.vectorized(RUN):
                    loaded[(part * RUNS + u) * RUN + v] = -T.infinity("float32")
        else:
            for v in T.unroll(RUN):
                loaded[(part * RUNS + u) * RUN + v] = T.if_then_else(
                    column + v < width, scores[row, T.min(column + v, width - 1), 0], -T.infinity("float32")
                )


@T.macro
def append(loaded, part, numbers, columns, counts, state, bounds, step, warp, lane):
    """Lists the columns of a step that are above the cut."""
    flags = T.alloc_local((RUNS,), "int32")
    place = T.alloc_local((RUNS,), "int32")
    sums = T.alloc_local((1,), "int32")
    before = T.alloc_local((1,), "int32")
    at = T.alloc_local((1,), "int32")
    cut = score_of(bounds[CUT])
    sums[0] = 0
    for u in T.unroll(RUNS):
        flags[u] = (1 << RUN) - 1
        for v in T.unroll(RUN):
            # A NaN is above. (`not x <= cut` would become `x > cut` on the way to the device.)
            if loaded[(part * RUNS + u) * RUN + v] <= cut:
                flags[u] = flags[u] ^ (1 << v)
        sums[0] = sums[0] | (T.cast(T.popcount(T.cast(flags[u], "uint32")), "int32") << (16 * u))
    # Sums of the lanes before this one, of every run in a half of the word.
    before[0] = sums[0]
    for step_of_scan in T.unroll(5):
        other = T.shfl_up(before[0], 1 << step_of_scan)
        if lane >= (1 << step_of_scan):
            before[0] = before[0] + other
    at[0] = T.shfl_sync(before[0], LANES - 1)
    before[0] = before[0] - sums[0]
    if lane == 0:
        counts[OF_OTHERS + part * WARPS + warp] = (at[0] & 65535) + (at[0] >> 16)
    place[0] = before[0] & 65535
    place[1] = (before[0] >> 16) + (at[0] & 65535)
    T.sync_threads()
    # Of all warps in the low half, of those before this one in the high half.
    sums[0] = 0
    if lane < WARPS:
        sums[0] = counts[OF_OTHERS + part * WARPS + lane]
        if lane < warp:
            sums[0] = sums[0] * 65537
    warp_sum(sums, 1)
    for u in T.unroll(RUNS):
        if flags[u] != 0:
            at[0] = state[LENGTH] + (sums[0] >> 16) + place[u]
            for v in T.unroll(RUN):
                if (flags[u] & (1 << v)) != 0:
                    numbers[at[0]] = ordered(loaded[(part * RUNS + u) * RUN + v])
                    columns[state[SIDE] + at[0]] = step * STEP + ((warp * RUNS + u) * LANES + lane) * RUN + v
                    at[0] = at[0] + 1
    state[LENGTH] = state[LENGTH] + (sums[0] & 65535)


@T.macro
def choose_cut(scores, row, width, wanted, numbers, bins, counts, state, bounds, thread, warp, lane, vector):
    """A cut that about `wanted` columns are above, from runs of columns that are spread over the row.

    A share p of the columns makes a share 1 - (1 - p)^SAMPLE of the largest ones of SAMPLE columns.
    """
    best = T.alloc_local((1,), "uint32")
    share = T.alloc_local((1,), "float32")
    best[0] = T.uint32(0)
    for j in T.unroll(SAMPLE):
        start = T.cast(T.cast(warp * SAMPLE + j, "int64") * width // (WARPS * SAMPLE), "int32")
        column = T.min(start + lane, width - 1)
        best[0] = T.max(best[0], ordered(scores[row, column // vector, column % vector]))
    share[0] = 1.0 - T.cast(wanted, "float32") / T.cast(width, "float32")
    for _ in T.unroll(SAMPLE.bit_length() - 1):
        share[0] = share[0] * share[0]
    least = T.cast((1.0 - share[0]) * THREADS, "int32")
    numbers[thread] = best[0]
    state[LENGTH] = THREADS
    bounds[LOW] = T.uint32(MINUS_INFINITY)
    bounds[HIGH] = T.uint32(0xFFFFFFFF)
    state[ABOVE_LOW] = THREADS
    state[ABOVE_HIGH] = 0
    narrow(numbers, bins, counts, state, bounds, least, least + least // 8, thread, warp, lane)
    bounds[CUT] = bounds[LOW]
    bounds[FLOOR] = bounds[LOW]
    state[LENGTH] = 0
    T.sync_threads()


@T.macro
def shrink(numbers, columns, bins, counts, state, bounds, k, most, capacity, thread, warp, lane):
    """Leaves at least k columns of the list, at most `most`, and no one better outside; raises the cut."""
    items = capacity // THREADS
    own = T.alloc_local((items,), "uint32")
    sums = T.alloc_local((2,), "int32")
    place = T.alloc_local((2,), "int32")
    below = (T.uint32(1) << T.cast(lane, "uint32")) - T.uint32(1)
    find_bound(numbers, bins, counts, state, bounds, k, most, thread, warp, lane)
    per_lane = T.ceildiv(state[LENGTH], THREADS)
    sums[0] = 0
    for j in T.serial(per_lane):
        at = (warp * per_lane + j) * LANES + lane
        if at < state[LENGTH]:
            if numbers[at] > bounds[BOUND]:
                sums[0] = sums[0] + 1
            if numbers[at] == bounds[BOUND]:
                sums[0] = sums[0] + 65536
    warp_sum(sums, 1)
    places_of(place, sums, counts, warp, lane)
    for j in T.unroll(items):
        own[j] = T.uint32(0)
        at = (warp * per_lane + j) * LANES + lane
        if j < per_lane and at < state[LENGTH]:
            own[j] = numbers[at]
    T.sync_threads()
    other = capacity - state[SIDE]
    for j in T.unroll(items):
        if j < per_lane:
            better, equal = votes_on(own[j], bounds)
            rank = place[1] + T.cast(T.popcount(equal & below), "int32")
            at = place[0] + T.cast(T.popcount(better & below), "int32") + T.min(rank, state[WANTED])
            if own[j] > bounds[BOUND] or (own[j] == bounds[BOUND] and rank < state[WANTED]):
                numbers[at] = own[j]
                columns[other + at] = columns[state[SIDE] + (warp * per_lane + j) * LANES + lane]
            place[0] = place[0] + T.cast(T.popcount(better), "int32")
            place[1] = place[1] + T.cast(T.popcount(equal), "int32")
    state[LENGTH] = (sums[0] & 65535) + T.min(sums[0] >> 16, state[WANTED])
    state[SIDE] = other


@cuda_kernel(
    builds=lambda model: [
        {"k": model.index_topk, "block_size": 0, "vector": RUN},
        {"k": model.candidate_topk_blocks, "block_size": 0, "vector": RUN},
        {"k": model.index_topk, "block_size": model.candidate_block_size, "vector": RUN},
    ],
    pass_configs={"tl.disable_thread_storage_sync": True},
)
def kernel(k: int, block_size: int, vector: int):
    """Columns are returned, or the entries of candidate blocks of `block_size` > 0 that they stand for.

    Args:
        k, block_size: as in `select_entries`.
        vector: columns that are loaded at once: RUN where the width is a multiple of it, else 1.
    """
    n, runs, num_blocks = T.dynamic("n"), T.dynamic("runs"), T.dynamic("num_blocks")
    keep = max(KEEP, -(-7 * k // (4 * THREADS)) * THREADS)
    capacity = STEP + keep
    num_columns = runs * vector

    def entry_of(column, blocks, row):
        if not block_size:
            return column
        return blocks[row, column // block_size] * block_size + column % block_size

    @T.prim_func
    def select_entries(
        scores: T.Tensor((n, runs, vector), "float32"),
        blocks: T.Tensor((n, num_blocks), "int32"),
        out: T.Tensor((n, k), "int32"),
    ):
        with T.Kernel(n, threads=THREADS) as row:
            T.annotate_min_blocks_per_sm(2)
            thread = T.get_thread_binding()
            warp, lane = thread // LANES, thread % LANES
            numbers = T.alloc_shared((capacity,), "uint32")
            columns = T.alloc_shared((2 * capacity,), "int32")
            bins = T.alloc_shared((THREADS,), "int32")
            counts = T.alloc_shared((OF_OTHERS + DEPTH * WARPS,), "int32")
            sums = T.alloc_local((2,), "int32")
            place = T.alloc_local((2,), "int32")
            loaded = T.alloc_local((DEPTH * RUNS * RUN,), "float32")
            state = T.alloc_local((5,), "int32")
            bounds = T.alloc_local((5,), "uint32")
            state[LENGTH] = 0
            state[SIDE] = 0
            bounds[FLOOR] = T.uint32(MINUS_INFINITY)
            for attempt in T.serial(2):
                if attempt == 0 or (state[LENGTH] < k and bounds[FLOOR] > T.uint32(MINUS_INFINITY)):
                    state[LENGTH] = 0
                    bounds[CUT] = T.uint32(MINUS_INFINITY)
                    bounds[FLOOR] = T.uint32(MINUS_INFINITY)
                    for part in T.unroll(DEPTH):
                        load(loaded, part, scores, row, num_columns, part, warp, lane, vector)
                    if attempt == 0 and num_columns > capacity:
                        choose_cut(
                            scores,
                            row,
                            num_columns,
                            k + SPARE,
                            numbers,
                            bins,
                            counts,
                            state,
                            bounds,
                            thread,
                            warp,
                            lane,
                            vector,
                        )
                    T.sync_threads()
                    for turn in T.serial(T.ceildiv(num_columns, STEP * DEPTH)):
                        for part in T.unroll(DEPTH):
                            step = turn * DEPTH + part
                            append(loaded, part, numbers, columns, counts, state, bounds, step, warp, lane)
                            load(loaded, part, scores, row, num_columns, step + DEPTH, warp, lane, vector)
                            if state[LENGTH] > keep and (step + 1) * STEP < num_columns:
                                shrink(
                                    numbers,
                                    columns,
                                    bins,
                                    counts,
                                    state,
                                    bounds,
                                    k,
                                    k + k // 2,
                                    capacity,
                                    thread,
                                    warp,
                                    lane,
                                )
                                # Loaded again rather than held in registers meanwhile.
                                for ahead in T.unroll(DEPTH):
                                    load(
                                        loaded,
                                        (part + 1 + ahead) % DEPTH,
                                        scores,
                                        row,
                                        num_columns,
                                        step + 1 + ahead,
                                        warp,
                                        lane,
                                        vector,
                                    )
            find_bound(numbers, bins, counts, state, bounds, k, k, thread, warp, lane)
            below = (T.uint32(1) << T.cast(lane, "uint32")) - T.uint32(1)
            per_lane = T.ceildiv(state[LENGTH], THREADS)
            sums[0] = 0
            for j in T.serial(per_lane):
                at = (warp * per_lane + j) * LANES + lane
                number = number_at(numbers, state, at)
                better, equal = votes_on(number, bounds)
                sums[0] = (
                    sums[0] + T.cast(T.popcount(better), "int32") + 65536 * T.cast(T.popcount(equal), "int32")
                )
            places_of(place, sums, counts, warp, lane)
            for j in T.serial(per_lane):
                at = (warp * per_lane + j) * LANES + lane
                number = number_at(numbers, state, at)
                better, equal = votes_on(number, bounds)
                rank = place[1] + T.cast(T.popcount(equal & below), "int32")
                to = place[0] + T.cast(T.popcount(better & below), "int32") + T.min(rank, state[WANTED])
                if number > bounds[BOUND] or (number == bounds[BOUND] and rank < state[WANTED]):
                    out[row, to] = entry_of(columns[state[SIDE] + at], blocks, row)
                place[0] = place[0] + T.cast(T.popcount(better), "int32")
                place[1] = place[1] + T.cast(T.popcount(equal), "int32")
            state[LENGTH] = (sums[0] & 65535) + T.min(sums[0] >> 16, state[WANTED])
            for i in T.serial(T.ceildiv(k, THREADS)):
                if i * THREADS + thread >= state[LENGTH] and i * THREADS + thread < k:
                    out[row, i * THREADS + thread] = -1

    return select_entries


def run(scores: Tensor, k: int, blocks: Tensor | None = None, block_size: int = 0) -> Tensor:
    out = torch.empty(scores.shape[0], k, dtype=torch.int32, device=scores.device)
    scores = scores.contiguous()
    vector = RUN if scores.shape[1] % RUN == 0 and scores.data_ptr() % 16 == 0 else 1
    blocks = out if blocks is None else blocks.contiguous()
    kernel(k=k, block_size=block_size, vector=vector)(scores.view(out.shape[0], -1, vector), blocks, out)
    return out
