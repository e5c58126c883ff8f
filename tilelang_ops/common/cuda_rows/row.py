"""A block's row: its memory, keys of its tokens, walks over its scores, and reductions over the threads."""

import tilelang.language as T

from tilelang_ops.common.cuda_noise import EXACT, keep
from tilelang_ops.common.noise import ROUNDS

BINS = 4096  # places of a histogram
BUCKETS = 2048  # of a sort
# Options of programs made of these macros: they synchronise by themselves, and reach only into their tensors.
OPTIONS = {
    **EXACT,
    "tl.disable_thread_storage_sync": True,
    "tl.disable_shared_memory_reuse": True,
    "tl.disable_safe_memory_legalize": True,
}

LOWEST = -3.4028234663852886e38  # the lowest finite float
# Slots of `Row.ints`.
LIST_SIZE, QUEUE_SIZE, K_PLACE, ABOVE_K, HIGH_PLACE, LOW_PLACE, NUM_RIVALS = range(7)


class Row:
    """A block's row: where its scores are, and the memory that the macros share.

    Args:
        logits: [n, vocab] float32, contiguous.
        row: the block's.
        vocab, num_threads, capacity: compile-time; capacity of the list.
        unroll: groups of a thread that are on their way at once.
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
        self.num_warps = num_threads // 32  # a power of two
        self.warp_offsets = tuple(1 << i for i in reversed(range(self.num_warps.bit_length() - 1)))
        self.counts = T.alloc_shared((BINS,), "int32")
        self.list = T.alloc_shared((max(1, capacity),), "uint64")
        self.buckets = T.alloc_shared((BUCKETS,), "int32")
        self.unsorted = T.alloc_shared((max(1, capacity),), "uint64")
        self.queue_capacity = max(1, min(capacity, 1024))
        self.queue = T.alloc_shared((self.queue_capacity,), "int32")
        self.ints = T.alloc_shared((8,), "int32")
        self.longs = T.alloc_shared((2,), "int64")
        self.bound = T.alloc_shared((1,), "uint32")  # ordered bits of a lower bound of the winner
        self.scratch = {
            d: T.alloc_shared((32,), d) for d in ("float32", "float64", "int32", "int64", "uint64")
        }
        # In shared memory, so that they are not held in registers during a walk.
        self.keys = T.alloc_shared((2 * ROUNDS,), "uint32")  # of Philox's rounds
        self.index = T.alloc_shared((1,), "int64")
        self.row_again = T.alloc_shared((1,), "int32")
        self.top_k = T.alloc_shared((1,), "int32")  # <= 0: off
        self.top_p = T.alloc_shared((1,), "float32")  # >= 1: off
        self.domain = T.alloc_local((1,), "int32")
        self.scale = T.alloc_local((1,), "float32")
        self.ahead = T.alloc_local((4 * unroll,), "float32")
        self.raw = T.alloc_local((4 * unroll,), "float32")
        self.scores = T.alloc_local((4 * unroll,), "float32")
        self.words = T.alloc_local((4,), "uint32")
        self.near = T.alloc_local((4,), "float32")
        self.nothing = T.alloc_local((1,), "int32")  # of `whole_branch`
        self.picks = T.alloc_local((4,), "int32")  # which tokens of a group `list_picked` lists: 1, others 0
        self.is_broken = T.alloc_local((1,), "int32")  # NaN in the row
        self.raw_peak = T.alloc_local((1,), "float32")
        self.peak = T.alloc_local((1,), "float32")  # largest score
        self.reference = T.alloc_local((1,), "float32")  # largest of a sample
        self.near_all = T.alloc_local((1,), "float32")  # masses of the row in float32
        self.floor = T.alloc_local((1,), "float32")  # scores from here on pass min-p
        self.mass_all = T.alloc_local((1,), "int64")
        self.threshold = T.alloc_shared((1,), "int64")
        self.cut = T.alloc_local((1,), "uint64")  # key of the last token that stays
        self.limit = T.alloc_local((1,), "uint64")
        self.best = T.alloc_local((1,), "uint64")
        self.count = T.alloc_local((1,), "int64")
        self.total = T.alloc_local((1,), "float64")


@T.macro
def whole_branch(r):
    """The other branch of an `if`, which does nothing.

    TileLang splits a branch without another into one for every statement, all with the same condition; then
    what a statement leaves for the next is a variable of the whole program, in a register throughout.
    """
    r.nothing[0] = 0


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
def reduce_block(r, value, combine):
    """value[0] of all threads combined, in every thread; the order is fixed."""
    scratch = r.scratch[str(value.dtype)]
    for offset in (16, 8, 4, 2, 1):
        other = T.shfl_xor(value[0], offset)
        value[0] = combine(value[0], other)
    if r.thread % 32 == 0:
        scratch[r.thread // 32] = value[0]
    T.sync_threads()
    value[0] = scratch[r.thread % r.num_warps]
    _combine_warps(r, value, combine)
    T.sync_threads()


@T.macro
def _combine_warps(r, value, combine):
    """value[0] of as many neighbouring lanes as there are warps combined, in all of them."""
    for offset in r.warp_offsets:
        other = T.shfl_xor(value[0], offset)
        value[0] = combine(value[0], other)


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
    total[0] = r.scratch["int64"][r.thread % r.num_warps]
    before[0] = T.if_then_else(r.thread % r.num_warps < r.thread // 32, total[0], T.int64(0))
    _combine_warps(r, total, added)
    _combine_warps(r, before, added)
    before[0] = before[0] + (inclusive[0] - value[0])
    T.sync_threads()


@T.macro
def load_group(r, group, base, buffer):
    """Logits of a group into buffer[base : base + 4]; -inf behind the last token."""
    _load_of(r, r.row, group, base, buffer)


@T.macro
def _load_of(r, row, group, base, buffer):
    if r.vocab % 4 == 0:
        if group < r.groups:
            for j in T.vectorized(4):
                buffer[base + j] = r.logits[row, group * 4 + j]
        else:
            for j in T.unroll(4):
                buffer[base + j] = -T.infinity("float32")
    else:
        for j in T.unroll(4):
            buffer[base + j] = -T.infinity("float32")
            if group * 4 + j < r.vocab:
                buffer[base + j] = r.logits[row, group * 4 + j]


@T.macro
def load_group_again(r, group, buffer):
    """The same after `load_sample`, from the cache."""
    row = T.alloc_local((1,), "int32")
    row[0] = r.row_again[0]
    _load_of(r, row[0], group, 0, buffer)


@T.macro
def walk(r, body):
    """Calls body(r, base, group) for every group of the row, its scores in r.scores[base : base + 4]."""
    _walk_of(r, r.row, body, r.unroll)


@T.macro
def walk_again(r, body, unroll=1):
    """The same after `load_sample`, for the compiler a walk over any row: else it would hold what the first
    walk began with in registers, for the next one.

    unroll: groups of a thread that are on their way at once, not more than those of the row.
    """
    row = T.alloc_local((1,), "int32")
    row[0] = r.row_again[0]
    _walk_of(r, row[0], body, unroll)


@T.macro
def walk_back(r, body):
    """`walk_again` from the end of the row, where the cache may still hold what the last walk read."""
    row = T.alloc_local((1,), "int32")
    row[0] = r.row_again[0]
    steps = -(-r.groups // (r.unroll * r.num_threads))
    last = steps * r.unroll * r.num_threads - 1 - r.thread
    for u in T.unroll(r.unroll):
        _load_of(r, row[0], last - u * r.num_threads, 4 * u, r.ahead)
    for step in T.serial(steps):
        for j in T.unroll(4 * r.unroll):
            r.raw[j] = r.ahead[j]
        for u in T.unroll(r.unroll):
            if step + 1 < steps:
                _load_of(r, row[0], last - ((step + 1) * r.unroll + u) * r.num_threads, 4 * u, r.ahead)
        for u in T.unroll(r.unroll):
            for j in T.unroll(4):
                r.scores[4 * u + j] = r.raw[4 * u + j] * r.scale[0]
            body(r, 4 * u, last - (step * r.unroll + u) * r.num_threads)


@T.macro
def _walk_of(r, row, body, unroll):
    for u in T.unroll(unroll):
        _load_of(r, row, u * r.num_threads + r.thread, 4 * u, r.ahead)
    for step in T.serial(-(-r.groups // (unroll * r.num_threads))):
        for j in T.unroll(4 * unroll):
            r.raw[j] = r.ahead[j]
        for u in T.unroll(unroll):
            _load_of(r, row, ((step + 1) * unroll + u) * r.num_threads + r.thread, 4 * u, r.ahead)
        for u in T.unroll(unroll):
            for j in T.unroll(4):
                r.scores[4 * u + j] = r.raw[4 * u + j] * r.scale[0]
            body(r, 4 * u, (step * unroll + u) * r.num_threads + r.thread)


@T.macro
def load_sample(r, s):
    """A group of a thread, all over the row of `s`, into s.raw; s.reference is the largest, but finite."""
    load_group(s, (r.thread * r.groups) // r.num_threads, 0, s.raw)
    s.reference[0] = largest(s.raw, 0)
    r.row_again[0] = r.row
    reduce_block(r, s.reference, larger)
    s.reference[0] = T.min(T.max(s.reference[0], T.float32(LOWEST)), T.float32(-LOWEST))


def largest(buffer, base):
    """Of four numbers."""
    return T.max(T.max(buffer[base], buffer[base + 1]), T.max(buffer[base + 2], buffer[base + 3]))


def is_nan(x):
    """By its bits: the compiler takes x != x for false."""
    return T.if_then_else((T.reinterpret(x, "int32") & 0x7FFFFFFF) > 0x7F800000, 1, 0)


@T.macro
def near_mass(buffer, base, reference):
    """Sum of exp(score - reference) of four scores, float32; NaN where a score is NaN, and nowhere else."""
    first = keep(T.__exp(buffer[base] - reference) + T.__exp(buffer[base + 1] - reference))
    second = keep(T.__exp(buffer[base + 2] - reference) + T.__exp(buffer[base + 3] - reference))
    return keep(first + second)


@T.macro
def watch(r, base, group):
    """Largest logit, and whether one is NaN."""
    r.raw_peak[0] = T.max(r.raw_peak[0], largest(r.raw, base))
    total = (r.raw[base] + r.raw[base + 1]) + (r.raw[base + 2] + r.raw[base + 3])
    if is_nan(total) == 1:
        r.is_broken[0] = 1


@T.macro
def finish_watch(r):
    """After the walk: what all threads saw."""
    reduce_block(r, r.raw_peak, larger)
    reduce_block(r, r.is_broken, larger)
    r.peak[0] = r.raw_peak[0] * r.scale[0]


@T.macro
def start_watch(r):
    """Before a walk that watches."""
    r.raw_peak[0] = -T.infinity("float32")
    r.is_broken[0] = 0


@T.macro
def is_whole(r):
    """Whether the row has a possible token and nothing broken."""
    return r.is_broken[0] == 0 and T.abs(r.raw_peak[0]) <= T.float32(-LOWEST)
