"""select_entries on CUDA: a radix search for the k-th best score, one block for a row.

Scores become unsigned numbers of the same order. Histograms of 11, 11 and 10 bits find the k-th best number
exactly. The first reads the whole row. What lies in its threshold's bin or above is usually little, so the
second reading lists those columns and the rest works on the list; where the list would not fit (many equal
scores) it works on the row. Columns are taken in ascending order, by ranks within warps and between them.
"""

import tilelang.language as T
import torch
from torch import Tensor

from tilelang_ops.common.kernels import cuda_kernel

THREADS = 512
WARPS = THREADS // 32
UNROLL = 8  # columns of a thread between barriers
BINS = 2048
PER_THREAD = BINS // THREADS
CAPACITY = 6144  # columns of the list
MINUS_INFINITY = 0x007FFFFF  # its ordered number; what is not above is never chosen
SHIFTS, BITS = (21, 10, 0), (11, 11, 10)
# What a thread knows of the search: how many of those equal to the cut are chosen, columns of the list or the
# row, whether there is a list, whether all that can be chosen is.
WANTED, LENGTH, IS_LISTED, TAKES_ALL = range(4)


def ordered(score):
    """Ordered uint32 of a score; -0 equals 0."""
    bits = T.reinterpret(score + T.float32(0.0), "uint32")
    return T.if_then_else(bits >= T.uint32(1 << 31), ~bits, bits | T.uint32(1 << 31))


@T.macro
def scan(line, size, thread, total):
    """Exclusive running sums of `line`, by the first warp; the whole sum goes to `total[0]`."""
    T.sync_threads()
    if thread < 32:
        carry = T.alloc_local((1,), "int32")
        run = T.alloc_local((1,), "int32")
        own = T.alloc_local((1,), "int32")
        carry[0] = 0
        for part in T.serial(size // 32):
            own[0] = line[part * 32 + thread]
            run[0] = own[0]
            for step in T.unroll(5):
                other = T.shfl_up(run[0], 1 << step)
                if thread >= (1 << step):
                    run[0] = run[0] + other
            line[part * 32 + thread] = carry[0] + run[0] - own[0]
            carry[0] = carry[0] + T.shfl_sync(run[0], 31)
        if thread == 0:
            total[0] = carry[0]
    T.sync_threads()


@T.macro
def ranks(flags, before, line, total, thread):
    """`before[u]`: how many flags stand before column u of this thread; columns lie thread by thread."""
    below = (T.uint32(1) << T.cast(thread % 32, "uint32")) - T.uint32(1)
    for u in T.unroll(UNROLL):
        votes = T.cast(T.ballot(flags[u] != 0), "uint32")
        before[u] = T.cast(T.popcount(votes & below), "int32")
        if thread % 32 == 0:
            line[u * WARPS + thread // 32] = T.cast(T.popcount(votes), "int32")
    scan(line, UNROLL * WARPS, thread, total)
    for u in T.unroll(UNROLL):
        before[u] = before[u] + line[u * WARPS + thread // 32]


@T.macro
def narrow(scores, row, thread, bins, sums, listed, total, found, search, cut, shift, num_bits, before_shift):
    """One histogram: `num_bits` more of the k-th best number, those from bit `shift` on."""
    above = T.alloc_local((1,), "int32")
    place = T.alloc_local((1,), "int32")
    loaded = T.alloc_local((UNROLL,), "float32")
    if search[TAKES_ALL] == 0:
        for i in T.serial(PER_THREAD):
            bins[i * THREADS + thread] = 0
        T.sync_threads()
        for i in T.serial(T.ceildiv(search[LENGTH], THREADS * UNROLL)):
            for u in T.unroll(UNROLL):  # all loads first: they are what takes time
                place[0] = (i * UNROLL + u) * THREADS + thread
                is_inside = place[0] < search[LENGTH]
                if search[IS_LISTED] != 0 and is_inside:
                    place[0] = listed[place[0]]
                loaded[u] = T.if_then_else(
                    is_inside, scores[row, T.if_then_else(is_inside, place[0], 0)], -T.infinity("float32")
                )
            for u in T.unroll(UNROLL):
                number = ordered(loaded[u])
                if number > T.uint32(MINUS_INFINITY):
                    value = T.cast((number >> T.uint32(shift)) & T.uint32((1 << num_bits) - 1), "int32")
                    if before_shift < 0:
                        T.atomic_add(bins[value], 1)
                    else:
                        if (number >> T.uint32(before_shift)) == cut[0]:
                            T.atomic_add(bins[value], 1)
        T.sync_threads()
        # Threads own bins in descending order; `above` counts what is better than theirs.
        above[0] = 0
        for i in T.serial(PER_THREAD):
            above[0] = above[0] + bins[BINS - 1 - (thread * PER_THREAD + i)]
        sums[thread] = above[0]
        scan(sums, THREADS, thread, total)
        above[0] = sums[thread]
        for i in T.serial(PER_THREAD):
            inside = bins[BINS - 1 - (thread * PER_THREAD + i)]
            if above[0] < search[WANTED] and above[0] + inside >= search[WANTED]:
                found[0] = BINS - 1 - (thread * PER_THREAD + i)
                found[1] = search[WANTED] - above[0]
                found[2] = above[0] + inside
            above[0] = above[0] + inside
        T.sync_threads()
        if total[0] < search[WANTED]:  # only the first histogram can hold too few
            search[TAKES_ALL] = 1
            cut[0] = T.uint32(MINUS_INFINITY)
            search[WANTED] = 0
        else:
            cut[0] = (cut[0] << T.uint32(num_bits)) | T.cast(found[0], "uint32")
            search[WANTED] = found[1]
        T.sync_threads()


@cuda_kernel(builds=lambda model: [{"k": k} for k in (model.index_topk, model.candidate_topk_blocks)])
def kernel(k: int):
    n, width = T.dynamic("n"), T.dynamic("width")

    @T.prim_func
    def select_entries(scores: T.Tensor((n, width), "float32"), out: T.Tensor((n, k), "int32")):
        with T.Kernel(n, threads=THREADS) as row:
            thread = T.get_thread_binding()
            bins = T.alloc_shared((BINS,), "int32")
            sums = T.alloc_shared((THREADS,), "int32")
            listed = T.alloc_shared((CAPACITY,), "int32")
            line = T.alloc_shared((UNROLL * WARPS,), "int32")
            tie_line = T.alloc_shared((UNROLL * WARPS,), "int32")
            total = T.alloc_shared((1,), "int32")
            ties = T.alloc_shared((1,), "int32")
            found = T.alloc_shared((3,), "int32")  # bin, wanted inside it, columns in it and above
            flags = T.alloc_local((UNROLL,), "int32")
            equal = T.alloc_local((UNROLL,), "int32")
            column = T.alloc_local((UNROLL,), "int32")
            loaded = T.alloc_local((UNROLL,), "float32")
            before = T.alloc_local((UNROLL,), "int32")
            ties_before = T.alloc_local((UNROLL,), "int32")
            cut = T.alloc_local((1,), "uint32")  # digits of the k-th best number found so far
            search = T.alloc_local((4,), "int32")
            place = T.alloc_local((1,), "int32")
            done = T.alloc_local((1,), "int32")
            ties_done = T.alloc_local((1,), "int32")
            cut[0] = T.uint32(0)
            search[WANTED] = k
            search[LENGTH] = width
            search[IS_LISTED] = 0
            search[TAKES_ALL] = 0

            narrow(scores, row, thread, bins, sums, listed, total, found, search, cut, SHIFTS[0], BITS[0], -1)
            if search[TAKES_ALL] == 0 and found[2] <= CAPACITY:
                done[0] = 0
                for i in T.serial(T.ceildiv(width, THREADS * UNROLL)):
                    for u in T.unroll(UNROLL):
                        column[u] = (i * UNROLL + u) * THREADS + thread
                        loaded[u] = T.if_then_else(
                            column[u] < width,
                            scores[row, T.min(column[u], width - 1)],
                            -T.infinity("float32"),
                        )
                    for u in T.unroll(UNROLL):
                        number = ordered(loaded[u])
                        flags[u] = 0
                        if number > T.uint32(MINUS_INFINITY) and (number >> T.uint32(21)) >= cut[0]:
                            flags[u] = 1
                    ranks(flags, before, line, total, thread)
                    for u in T.unroll(UNROLL):
                        if flags[u] != 0:
                            listed[done[0] + before[u]] = column[u]
                    done[0] = done[0] + total[0]
                    T.sync_threads()
                search[LENGTH] = done[0]
                search[IS_LISTED] = 1

            narrow(
                scores,
                row,
                thread,
                bins,
                sums,
                listed,
                total,
                found,
                search,
                cut,
                SHIFTS[1],
                BITS[1],
                SHIFTS[0],
            )
            narrow(
                scores,
                row,
                thread,
                bins,
                sums,
                listed,
                total,
                found,
                search,
                cut,
                SHIFTS[2],
                BITS[2],
                SHIFTS[1],
            )

            done[0] = 0
            ties_done[0] = 0
            for i in T.serial(T.ceildiv(search[LENGTH], THREADS * UNROLL)):
                for u in T.unroll(UNROLL):
                    flags[u] = 0
                    equal[u] = 0
                    place[0] = (i * UNROLL + u) * THREADS + thread
                    if place[0] < search[LENGTH]:
                        if search[IS_LISTED] != 0:
                            place[0] = listed[place[0]]
                        column[u] = place[0]
                        number = ordered(scores[row, place[0]])
                        if number > cut[0]:
                            flags[u] = 1
                        if number == cut[0]:
                            equal[u] = 1
                ranks(flags, before, line, total, thread)
                ranks(equal, ties_before, tie_line, ties, thread)
                for u in T.unroll(UNROLL):
                    # Better columns and chosen ties that stand in front give the place.
                    place[0] = done[0] + before[u] + T.min(ties_done[0] + ties_before[u], search[WANTED])
                    if flags[u] != 0:
                        out[row, place[0]] = column[u]
                    if equal[u] != 0 and ties_done[0] + ties_before[u] < search[WANTED]:
                        out[row, place[0]] = column[u]
                done[0] = done[0] + total[0]
                ties_done[0] = ties_done[0] + ties[0]
                T.sync_threads()
            for i in T.serial(T.ceildiv(k, THREADS)):
                place[0] = i * THREADS + thread
                if place[0] < k and place[0] >= done[0] + T.min(ties_done[0], search[WANTED]):
                    out[row, place[0]] = -1

    return select_entries


def run(scores: Tensor, k: int) -> Tensor:
    out = torch.empty(scores.shape[0], k, dtype=torch.int32, device=scores.device)
    kernel(k=k)(scores.contiguous(), out)
    return out
