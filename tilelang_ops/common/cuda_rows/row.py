"""A block's row: its memory, keys of its tokens, walks over its scores, and reductions over the threads."""

import tilelang.language as T

from tilelang_ops.common.cuda_noise import EXACT, keep

BINS = 4096
# Options of programs made of these macros: they synchronise by themselves.
OPTIONS = {**EXACT, "tl.disable_thread_storage_sync": True, "tl.disable_shared_memory_reuse": True}

LOWEST = -3.4028234663852886e38  # the lowest finite float
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
def finish_watch(r):
    reduce_block(r, r.raw_peak, larger)
    reduce_block(r, r.is_broken, larger)
    r.peak[0] = r.raw_peak[0] * r.scale[0]


@T.macro
def start_watch(r):
    r.raw_peak[0] = -T.infinity("float32")
    r.is_broken[0] = 0


@T.macro
def is_whole(r):
    """Whether the row has a possible token and nothing broken."""
    return r.is_broken[0] == 0 and T.abs(r.raw_peak[0]) <= T.float32(-LOWEST)
