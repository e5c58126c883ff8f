"""The k-th best number of a list in shared memory, by all threads of a block.

A number that k others, or about as many, are above is found in turns: each counts the numbers between two
bounds in bins of equal size, as many as there are threads, and leaves the bin where the count is reached.
"""

from tilelang.cuda import language as T

THREADS, LANES = 512, 32
BIN_BITS = THREADS.bit_length() - 1
WARPS = THREADS // LANES
MINUS_INFINITY = 0x007FFFFF  # its ordered number; what is not above is never chosen
TURNS = 4  # until a bin holds one number: the first leaves 24 bits at most, each other one takes nine
# What all threads know: columns of the list, all of them above the floor; where in `columns` they lie; how
# many of those equal to the bound are kept; how many are above two numbers.
LENGTH, SIDE, WANTED, ABOVE_LOW, ABOVE_HIGH = range(5)
CUT, FLOOR, LOW, HIGH, BOUND = range(5)
# Places in `counts`: of the warps in a turn and in the list; what a turn finds; of the warps in other things.
OF_TURN, OF_LIST, FOUND, OF_OTHERS = 0, WARPS, 2 * WARPS, 2 * WARPS + 3


def ordered(score):
    """Ordered uint32 of a score; -0 equals 0. Nothing is added: a GPU's sums take the sign of NaN away."""
    bits = T.reinterpret(T.if_then_else(score == T.float32(0.0), T.float32(0.0), score), "uint32")
    return T.if_then_else(bits >= T.uint32(1 << 31), ~bits, bits | T.uint32(1 << 31))


def score_of(number):
    """The score with an ordered number."""
    is_positive = number >= T.uint32(1 << 31)
    return T.reinterpret(T.if_then_else(is_positive, number ^ T.uint32(1 << 31), ~number), "float32")


def number_at(numbers, state, at):
    """A number of the list; 0, which is below all of them, behind its end."""
    return T.if_then_else(at < state[LENGTH], numbers[T.min(at, state[LENGTH] - 1)], T.uint32(0))


def votes_on(number, bounds):
    """Which lanes of a warp have a number above the bound, and which the bound itself; bits of two words."""
    better = T.cast(T.ballot(number > bounds[BOUND]), "uint32")
    equal = T.cast(T.ballot(number == bounds[BOUND]), "uint32")
    return better, equal


@T.macro
def warp_sum(values, size):
    """Sums over a warp, in every lane of it."""
    for i in T.unroll(size):
        values[i] = T.warp_reduce_sum(values[i])


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
            # The exponent of a float32, rounded up at worst: then half of the bins stay empty.
            exponent = T.cast(T.reinterpret(T.cast(last[0], "float32"), "uint32") >> T.uint32(23), "int32")
            shift[0] = T.cast(T.max(exponent - (126 + BIN_BITS), 0), "uint32")
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
