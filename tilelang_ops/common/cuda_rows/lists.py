"""The list of tokens among which a cut is: filling and sorting it."""

import tilelang.language as T

from tilelang_ops.common.cuda_noise import keep
from tilelang_ops.common.cuda_rows.row import (
    BUCKETS,
    LIST_SIZE,
    larger,
    pack,
    packed_score,
    reduce_block,
    scan_block,
    smaller,
    whole_branch,
)

BIGGEST_BUCKET = 256  # from here on a sort does not count in buckets


@T.macro
def list_picked(r, base, group):
    """Lists the tokens of a group whose r.picks[j] is 1: a logit's bits and a token, until `pack_list`."""
    number = r.picks[0] + r.picks[1] + (r.picks[2] + r.picks[3])
    if number > 0:
        r.slot[0] = T.atomic_add(r.ints[LIST_SIZE], number, return_prev=True)
        for j in T.unroll(4):
            if r.picks[j] == 1 and r.slot[0] < r.capacity:
                bits = T.cast(T.reinterpret(r.raw[base + j], "uint32"), "uint64")
                r.list[r.slot[0]] = (bits << T.uint64(32)) | T.cast(group * 4 + j, "uint64")
            else:
                whole_branch(r)
            r.slot[0] = r.slot[0] + r.picks[j]
    else:
        whole_branch(r)


@T.macro
def pack_list(r):
    """The list, which is whole, as keys."""
    at = T.alloc_local((1,), "int32")
    at[0] = r.thread
    while at[0] < r.ints[LIST_SIZE]:
        entry = keep(r.list[at[0]])
        raw = T.reinterpret(T.cast(entry >> T.uint64(32), "uint32"), "float32")
        r.list[at[0]] = pack(r, raw * r.scale[0], T.cast(entry & T.uint64(0xFFFFFFFF), "int32"))
        at[0] = at[0] + r.num_threads
    T.sync_threads()


@T.macro
def _sort_by_swaps(r, size):
    """Sorts list[0 : size[0]] in descending order, size a power of two."""
    width = T.alloc_local((1,), "int32")
    stride = T.alloc_local((1,), "int32")
    width[0] = 2
    while width[0] <= size[0]:
        stride[0] = width[0] // 2
        while stride[0] > 0:
            for i in T.unroll(size[0] // 2 // r.num_threads, unroll_factor=1):
                at = i * r.num_threads + r.thread
                low = keep((at // stride[0]) * (2 * stride[0]) + at % stride[0])
                high = keep(low + stride[0])
                a = keep(r.list[low])
                b = keep(r.list[high])
                descends = (low // width[0]) % 2 == 0
                if (descends and a < b) or (not descends and a > b):
                    r.list[low] = b
                    r.list[high] = a
                else:
                    whole_branch(r)
            T.sync_threads()
            stride[0] = stride[0] // 2
        width[0] = width[0] * 2


@T.macro
def _bucket_of(r, key, top, per_unit):
    """A bucket never falls where a key does."""
    at = T.min((top - packed_score(r, key)) * per_unit, T.float32(BUCKETS - 1.0))
    return keep(T.cast(at, "int32"))


@T.macro
def sort_list(r):
    """Sorts the list, which is whole, in descending order: into buckets by score, in these by counting."""
    at = T.alloc_local((1,), "int32")
    top = T.alloc_local((1,), "float32")
    bottom = T.alloc_local((1,), "float32")
    own = T.alloc_local((1,), "int64")
    before = T.alloc_local((1,), "int64")
    total = T.alloc_local((1,), "int64")
    rank = T.alloc_local((1,), "int32")
    fullest = T.alloc_local((1,), "int32")
    start = T.alloc_local((1,), "int32")
    size = T.alloc_local((1,), "int32")
    top[0] = -T.infinity("float32")
    bottom[0] = T.infinity("float32")
    T.sync_threads()
    at[0] = r.thread
    while at[0] < r.ints[LIST_SIZE]:
        top[0] = T.max(top[0], packed_score(r, r.list[at[0]]))
        bottom[0] = T.min(bottom[0], packed_score(r, r.list[at[0]]))
        at[0] = at[0] + r.num_threads
    for i in T.serial(BUCKETS // r.num_threads):
        r.buckets[i * r.num_threads + r.thread] = 0
    reduce_block(r, top, larger)
    reduce_block(r, bottom, smaller)
    per_unit = T.float32(BUCKETS) / T.max(top[0] - bottom[0], T.float32(1e-6))
    at[0] = r.thread
    while at[0] < r.ints[LIST_SIZE]:
        T.atomic_add(r.buckets[_bucket_of(r, r.list[at[0]], top[0], per_unit)], 1)
        at[0] = at[0] + r.num_threads
    T.sync_threads()
    per_thread = BUCKETS // r.num_threads
    own[0] = 0
    fullest[0] = 0
    for i in T.serial(per_thread):
        own[0] = own[0] + T.cast(r.buckets[r.thread * per_thread + i], "int64")
        fullest[0] = T.max(fullest[0], r.buckets[r.thread * per_thread + i])
    reduce_block(r, fullest, larger)
    scan_block(r, own, before, total)
    if fullest[0] <= BIGGEST_BUCKET:
        for i in T.serial(per_thread):
            here = keep(r.buckets[r.thread * per_thread + i])
            r.buckets[r.thread * per_thread + i] = T.cast(before[0], "int32")
            before[0] = before[0] + T.cast(here, "int64")
        T.sync_threads()
        at[0] = r.thread
        while at[0] < r.ints[LIST_SIZE]:
            key = keep(r.list[at[0]])
            slot = T.atomic_add(r.buckets[_bucket_of(r, key, top[0], per_unit)], 1, return_prev=True)
            r.unsorted[slot] = key
            at[0] = at[0] + r.num_threads
        T.sync_threads()
        # A bucket now holds where it ends.
        at[0] = r.thread
        while at[0] < r.ints[LIST_SIZE]:
            key = keep(r.unsorted[at[0]])
            bucket = _bucket_of(r, key, top[0], per_unit)
            start[0] = 0
            if bucket > 0:
                start[0] = r.buckets[bucket - 1]
            rank[0] = start[0]
            for i in T.serial(r.buckets[bucket] - start[0]):
                if r.unsorted[start[0] + i] > key:
                    rank[0] = rank[0] + 1
            r.list[rank[0]] = key
            at[0] = at[0] + r.num_threads
        T.sync_threads()
    else:
        size[0] = 2 * r.num_threads
        while size[0] < r.ints[LIST_SIZE]:
            size[0] = size[0] * 2
        for i in T.unroll(size[0] // r.num_threads, unroll_factor=1):
            if i * r.num_threads + r.thread >= r.ints[LIST_SIZE]:
                r.list[i * r.num_threads + r.thread] = T.uint64(0)
        T.sync_threads()
        _sort_by_swaps(r, size)


@T.macro
def collect(r, base, group):
    """Puts the tokens of the places in question on the list."""
    for j in T.unroll(4):
        at = r.places[j]
        is_inside = (at >= r.low[0] and at <= r.high[0]) or at == r.k_place[0]
        r.picks[j] = T.if_then_else(is_inside and r.scores[base + j] >= r.floor[0], 1, 0)
    list_picked(r, base, group)
