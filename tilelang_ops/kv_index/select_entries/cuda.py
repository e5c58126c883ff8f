"""select_entries on CUDA: one reading of the scores, a block of threads for a row.

Scores become unsigned numbers of the same order. Columns whose number is above a cut are listed, in ascending
order; in the end the list shrinks to the k best. The cut is chosen from a sample of the row, so that somewhat
more than k columns are listed. Whatever it was, the result is exact:

    the list fills up      it shrinks to little more than the k best, and the cut rises to below the last of
                           them; what comes later and is not above it can never be chosen, since ties go to
                           the lower column
    it stays below k       the row is read again without a cut

A number that k others, or about as many, are above is found in turns: each counts the numbers between two
bounds in bins of equal size, as many as there are threads, and leaves the bin where the count is reached.
"""

import torch
from tilelang.cuda import language as T
from torch import Tensor

from tilelang_ops.common.kernels import cuda_kernel

THREADS, LANES = 512, 32
BIN_BITS = THREADS.bit_length() - 1
WARPS = THREADS // LANES
RUN = 4  # columns of a thread that lie together
RUNS = 2  # of them in a step
STEP = THREADS * RUN * RUNS
DEPTH = 2  # steps that are loaded ahead
KEEP = 2560  # columns that the list may have before a step
SAMPLE = 8  # columns of a thread
SPARE = 1024  # columns above k that are listed, about
MINUS_INFINITY = 0x007FFFFF  # its ordered number; what is not above is never chosen
TURNS = 4  # until a bin holds one number: THREADS ** TURNS >= 2^32
# What all threads know: columns of the list, all of them above the floor; where in `columns` they lie; how
# many of those equal to the bound are kept; how many are above two numbers.
LENGTH, SIDE, WANTED, ABOVE_LOW, ABOVE_HIGH = range(5)
CUT, FLOOR, LOW, HIGH, BOUND = range(5)
# Places in `counts`: of the warps in a step, in a turn and in a list; what a turn finds.
OF_TURN, OF_LIST, FOUND = DEPTH * WARPS, (DEPTH + 1) * WARPS, (DEPTH + 2) * WARPS


def ordered(score):
    """Ordered uint32 of a score; -0 equals 0. Nothing is added: a GPU's sums take the sign of NaN away."""
    bits = T.reinterpret(T.if_then_else(score == T.float32(0.0), T.float32(0.0), score), "uint32")
    return T.if_then_else(bits >= T.uint32(1 << 31), ~bits, bits | T.uint32(1 << 31))


def score_of(number):
    """The score with an ordered number."""
    is_positive = number >= T.uint32(1 << 31)
    return T.reinterpret(T.if_then_else(is_positive, number ^ T.uint32(1 << 31), ~number), "float32")


@T.macro
def warp_sum(values, size):
    """Sums over a warp, in every lane of it."""
    for i in T.unroll(size):
        values[i] = T.warp_reduce_sum(values[i])


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
        counts[part * WARPS + warp] = (at[0] & 65535) + (at[0] >> 16)
    place[0] = before[0] & 65535
    place[1] = (before[0] >> 16) + (at[0] & 65535)
    T.sync_threads()
    # Of all warps in the low half, of those before this one in the high half.
    sums[0] = 0
    if lane < WARPS:
        sums[0] = counts[part * WARPS + lane]
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
def narrow(numbers, bins, counts, state, bounds, least, most, thread, warp, lane):
    """Moves `low` up and `high` down while more than `most` of the listed numbers are above `low`.

    At least `least` numbers stay above `low`, and less than that above `high`.
    """
    # In registers: conditions on differences of unsigned numbers lower to nonsense.
    shift = T.alloc_local((1,), "uint32")
    last = T.alloc_local((1,), "uint32")
    distance = T.alloc_local((1,), "uint32")
    above = T.alloc_local((1,), "int32")
    higher = T.alloc_local((1,), "int32")
    for _ in T.serial(TURNS):
        if state[ABOVE_LOW] > most and bounds[HIGH] - bounds[LOW] > T.uint32(1):
            last[0] = bounds[HIGH] - bounds[LOW] - T.uint32(1)
            shift[0] = T.uint32(0)
            for b in T.unroll(32 - BIN_BITS):
                if (last[0] >> T.uint32(BIN_BITS + b)) != T.uint32(0):
                    shift[0] = T.uint32(b + 1)
            bins[thread] = 0
            T.sync_threads()
            for j in T.serial(T.ceildiv(state[LENGTH], THREADS)):
                at = T.min(j * THREADS + thread, state[LENGTH] - 1)
                distance[0] = numbers[at] - bounds[LOW] - T.uint32(1)
                if j * THREADS + thread < state[LENGTH] and distance[0] <= last[0]:
                    T.atomic_add(bins[T.cast(distance[0] >> shift[0], "int32")], 1)
            T.sync_threads()
            # How many are in this thread's bin and those above it.
            inside = bins[thread]
            above[0] = inside
            for step in T.unroll(5):
                other = T.shfl_down(above[0], 1 << step)
                if lane + (1 << step) < LANES:
                    above[0] = above[0] + other
            if lane == 0:
                counts[OF_TURN + warp] = above[0]
            T.sync_threads()
            higher[0] = 0
            if lane > warp and lane < WARPS:
                higher[0] = counts[OF_TURN + lane]
            warp_sum(higher, 1)
            above[0] = above[0] + higher[0] + state[ABOVE_HIGH]
            # Of too few, as of a sample that is mostly -inf, the first bin is left.
            if above[0] - inside < least and (above[0] >= least or thread == 0):
                counts[FOUND] = thread
                counts[FOUND + 1] = above[0]
                counts[FOUND + 2] = above[0] - inside
            T.sync_threads()
            found = T.cast(counts[FOUND], "uint32")
            # The last bin may hang over `high`, and its end be 2^32.
            bounds[HIGH] = (
                bounds[LOW] + T.uint32(1) + T.min(last[0], ((found + T.uint32(1)) << shift[0]) - T.uint32(1))
            )
            bounds[LOW] = bounds[LOW] + (found << shift[0])
            state[ABOVE_LOW] = counts[FOUND + 1]
            state[ABOVE_HIGH] = counts[FOUND + 2]


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
def find_bound(numbers, bins, counts, state, bounds, k, most, thread, warp, lane):
    """The bound that at least k columns of the list are above, at most `most`; raises the cut.

    If too many have the k-th best number it is the bound, and the first of them stay.
    """
    T.sync_threads()
    bounds[LOW] = bounds[FLOOR]
    bounds[HIGH] = T.uint32(0xFFFFFFFF)
    state[ABOVE_LOW] = state[LENGTH]
    state[ABOVE_HIGH] = 0
    narrow(numbers, bins, counts, state, bounds, k, most, thread, warp, lane)
    bounds[BOUND] = bounds[LOW]
    bounds[FLOOR] = bounds[LOW]
    state[WANTED] = 0
    if state[ABOVE_LOW] > most:  # `high` is the k-th best number
        bounds[BOUND] = bounds[HIGH]
        bounds[FLOOR] = bounds[HIGH] - T.uint32(1)
        state[WANTED] = k - state[ABOVE_HIGH]
    bounds[CUT] = T.max(bounds[CUT], bounds[BOUND])


@T.macro
def places_of(place, sums, counts, warp, lane):
    """From a warp's columns to those of the warps before it, and of all; better and equal ones in halves."""
    if lane == 0:
        counts[OF_LIST + warp] = sums[0]
    T.sync_threads()
    sums[0] = 0
    sums[1] = 0
    if lane < WARPS:
        sums[0] = counts[OF_LIST + lane]
        if lane < warp:
            sums[1] = sums[0]
    warp_sum(sums, 2)
    place[0] = sums[1] & 65535
    place[1] = sums[1] >> 16


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
    for j in T.unroll(items):
        own[j] = T.uint32(0)
        at = (warp * per_lane + j) * LANES + lane
        if j < per_lane and at < state[LENGTH]:
            own[j] = numbers[at]
        if own[j] > bounds[BOUND]:
            sums[0] = sums[0] + 1
        if own[j] == bounds[BOUND]:
            sums[0] = sums[0] + 65536
    warp_sum(sums, 1)
    places_of(place, sums, counts, warp, lane)
    other = capacity - state[SIDE]
    for j in T.unroll(items):
        if j < per_lane:
            better = T.cast(T.ballot(own[j] > bounds[BOUND]), "uint32")
            equal = T.cast(T.ballot(own[j] == bounds[BOUND]), "uint32")
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
            counts = T.alloc_shared((FOUND + 3,), "int32")
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
                number = T.if_then_else(
                    at < state[LENGTH], numbers[T.min(at, state[LENGTH] - 1)], T.uint32(0)
                )
                better = T.cast(T.ballot(number > bounds[BOUND]), "uint32")
                equal = T.cast(T.ballot(number == bounds[BOUND]), "uint32")
                sums[0] = (
                    sums[0] + T.cast(T.popcount(better), "int32") + 65536 * T.cast(T.popcount(equal), "int32")
                )
            places_of(place, sums, counts, warp, lane)
            for j in T.serial(per_lane):
                at = (warp * per_lane + j) * LANES + lane
                number = T.if_then_else(
                    at < state[LENGTH], numbers[T.min(at, state[LENGTH] - 1)], T.uint32(0)
                )
                better = T.cast(T.ballot(number > bounds[BOUND]), "uint32")
                equal = T.cast(T.ballot(number == bounds[BOUND]), "uint32")
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
