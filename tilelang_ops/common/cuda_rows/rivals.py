"""Top-p without the cut: draw from the whole row, then ask whether the winner stays.

A token of the nucleus that wins among all tokens wins in the nucleus. So the first walk draws from all, and
keeps not only the winner but the next ones: the rivals. In their order each is asked whether the mass before
it is at most top-p's share of all. The first that stays is the row's token.

    list     the first walk lists the largest scores. Where the mass before a rival is at most top-p's share
             of the list alone, the rival stays.
    ask      else one more walk sums the mass of all, and those before several rivals

Threads with equal last bits of their index share a place in r.leads: the largest perturbed score that they
met. The `RIVALS`-th largest of these bounds the queue, so that all tokens above it are rivals, and at least
so many. The bound of the list comes likewise from the largest scores in a sample.

Masses are of known error. Where they do not decide, and where all rivals fall out, the caller finds the cut.
"""

import tilelang.language as T

from tilelang_ops.common.cuda_noise import keep, noise_exact, noise_near, philox_words_by_keys
from tilelang_ops.common.cuda_rows.cut import LOG2_E, list_above, set_slope
from tilelang_ops.common.cuda_rows.draw import queue_group, word_of
from tilelang_ops.common.cuda_rows.masses import mass_of, take_near
from tilelang_ops.common.cuda_rows.row import (
    LIST_SIZE,
    NUM_RIVALS,
    QUEUE_SIZE,
    added,
    finish_watch,
    larger,
    largest,
    load_group,
    ordered,
    pack,
    packed_token,
    reduce_block,
    start_watch,
    unordered,
    walk_again,
    walk_back,
    watch,
    whole_branch,
)

LEADS = 16
RIVALS = 8
HEIGHTS = 4  # rank of the bound of the list: some 300 tokens of 129,280
ASKED = 4  # rivals of a walk
LEAST_TOP_P = 0.5  # below it, too often no rival stays


@T.macro
def draw_rivals(r):
    """The draw from all tokens: watches, leaves the rivals in the queue and the largest scores on the list.

    Without min-p and top-k, with top_p >= `LEAST_TOP_P`.
    """
    sample = (r.thread * r.groups) // r.num_threads
    load_group(r, sample, 0, r.raw)
    r.row_again[0] = r.row
    if r.thread < LEADS:
        r.leads[r.thread] = T.uint32(0)
        r.heights[r.thread] = T.uint32(0)
    else:
        whole_branch(r)
    if r.thread == 0:
        r.ints[LIST_SIZE] = 0
        r.ints[QUEUE_SIZE] = 0
        r.ints[NUM_RIVALS] = 0
    else:
        whole_branch(r)
    T.sync_threads()
    philox_words_by_keys(r.words, sample, r.keys, r.domain[0])
    for j in T.unroll(4):
        r.near[j] = r.raw[j] * r.scale[0] + noise_near(r.words[j])
    T.atomic_max(r.leads[r.thread % LEADS], ordered(largest(r.near, 0)))
    T.atomic_max(r.heights[r.thread % LEADS], ordered(largest(r.raw, 0)))
    T.sync_threads()
    _bound_rivals(r)
    height = T.alloc_local((1,), "uint32")
    height[0] = r.heights[r.thread % LEADS]
    if _is_ranked(r, height, HEIGHTS):
        r.bound_of_list[0] = unordered(height[0])
        r.least_listed[0] = unordered(height[0]) * r.scale[0]
    start_watch(r)
    T.sync_threads()
    walk_again(r, _draw_and_list, r.unroll)
    finish_watch(r)


@T.macro
def _draw_and_list(r, base, group):
    watch(r, base, group)
    if (group // r.num_threads) % r.num_warps == r.thread // 32:
        _bound_rivals(r)
    else:
        whole_branch(r)
    list_above(r, base, group)
    queue_group(r, base, group, r.leads, r.thread % LEADS)


@T.macro
def _is_ranked(r, own, rank):
    """Whether own[0] is the `rank`-th largest of those of 16 neighbouring lanes."""
    num_larger = T.alloc_local((1,), "int32")
    num_equal = T.alloc_local((1,), "int32")
    num_larger[0] = 0
    num_equal[0] = 1
    for offset in tuple(range(1, LEADS)):
        other = T.shfl_xor(own[0], offset)
        num_larger[0] = num_larger[0] + T.if_then_else(other > own[0], 1, 0)
        num_equal[0] = num_equal[0] + T.if_then_else(other == own[0], 1, 0)
    return num_larger[0] < rank and num_larger[0] + num_equal[0] >= rank


@T.macro
def _bound_rivals(r):
    """Sets r.bound to the `RIVALS`-th largest of r.leads; a warp does."""
    lead = T.alloc_local((1,), "uint32")
    lead[0] = r.leads[r.thread % LEADS]
    if _is_ranked(r, lead, RIVALS):
        r.bound[0] = lead[0]


@T.macro
def _list_rivals(r):
    """Keys of the rivals by perturbed scores, in r.unsorted[: r.ints[NUM_RIVALS]]."""
    at = T.alloc_local((1,), "int32")
    _bound_rivals(r)
    T.sync_threads()
    at[0] = r.thread
    while at[0] < r.ints[QUEUE_SIZE]:
        token = keep(r.queue[at[0]])
        score = keep(r.logits[r.row, token] * r.scale[0])
        word = word_of(r, token)
        # None above the bound is missing: the queue goes further, by more than near noise is off.
        if score + noise_near(word) >= unordered(r.bound[0]):
            slot = T.atomic_add(r.ints[NUM_RIVALS], 1, return_prev=True)
            r.unsorted[slot] = pack(r, score + noise_exact(word), token)
        else:
            whole_branch(r)
        at[0] = at[0] + r.num_threads
    T.sync_threads()


@T.macro
def _next_rival(r):
    """The key of the best rival below r.best, in r.best; 0: none."""
    at = T.alloc_local((1,), "int32")
    key = T.alloc_local((1,), "uint64")
    key[0] = T.uint64(0)
    at[0] = r.thread
    while at[0] < r.ints[NUM_RIVALS]:
        if r.unsorted[at[0]] < r.best[0]:
            key[0] = T.max(key[0], r.unsorted[at[0]])
        at[0] = at[0] + r.num_threads
    reduce_block(r, key, larger)
    r.best[0] = key[0]


@T.macro
def _sum_listed(r, key):
    """The mass of the tokens on the list whose keys are larger, in r.sum_above."""
    at = T.alloc_local((1,), "int32")
    r.sum_above[0] = 0
    at[0] = r.thread
    while at[0] < r.ints[LIST_SIZE]:
        entry = keep(r.list[at[0]])
        score = keep(T.reinterpret(T.cast(entry >> T.uint64(32), "uint32"), "float32") * r.scale[0])
        if pack(r, score, T.cast(entry & T.uint64(0xFFFFFFFF), "int32")) > key:
            r.sum_above[0] = r.sum_above[0] + mass_of(score - r.peak[0])
        else:
            whole_branch(r)
        at[0] = at[0] + r.num_threads
    reduce_block(r, r.sum_above, added)


@T.macro
def _note(r, i, score, token):
    """Notes a rival that the next walk asks about; `i` counts them."""
    if r.thread == 0:
        bits = T.reinterpret(score, "uint32")
        more = T.if_then_else(score < T.float32(0.0), bits - T.uint32(1), bits + T.uint32(1))
        r.asked_token[i] = token
        r.asked_score[i] = score
        more_than_any = T.if_then_else(score == T.float32(0.0), T.uint32(1), more)
        r.asked_above[i] = T.reinterpret(more_than_any, "float32")
        # Tokens of its own group with its score; for others the walk knows.
        r.asked_ties[i] = 0.0
        for j in T.unroll(4):
            before = token // 4 * 4 + j
            if before < token and r.logits[r.row, before] * r.scale[0] == score:
                r.asked_ties[i] = r.asked_ties[i] + T.float32(1.0)
    else:
        whole_branch(r)


@T.macro
def _ask_group(r, base, group):
    for j in T.unroll(4):
        r.near[j] = T.exp2(T.ieee_fmaf(r.raw[base + j], r.slope[0], r.offset[0]))
    r.near_all[0] = r.near_all[0] + ((r.near[0] + r.near[1]) + (r.near[2] + r.near[3]))
    for i in T.unroll(ASKED):
        # Tokens of earlier groups are before a rival where their scores are as large.
        least = keep(T.if_then_else(group < r.asked_group[i], r.asked_least[i], r.asked_more[i]))
        for j in T.unroll(4):
            if r.scores[base + j] >= least:
                r.asked_sum[i] = r.asked_sum[i] + r.near[j]


@T.macro
def _ask(r, num_asked):
    """The mass of all, and r.asked_mass before the rivals that are noted."""
    T.sync_threads()
    set_slope(r, r.peak[0])
    r.near_all[0] = 0.0
    r.near_above[0] = 0.0
    for i in T.unroll(ASKED):
        at = T.min(i, num_asked - 1)
        r.asked_group[i] = r.asked_token[at] // 4
        r.asked_least[i] = r.asked_score[at]
        r.asked_more[i] = r.asked_above[at]
        own = T.exp2(T.ieee_fmaf(r.asked_score[at], T.float32(LOG2_E), r.offset[0]))
        r.asked_sum[i] = T.if_then_else(r.thread == 0, r.asked_ties[at] * own, T.float32(0.0))
    walk_back(r, _ask_group)
    reduce_block(r, r.near_all, added)
    take_near(r, (T.abs(r.peak[0]) + T.float32(16.0)) * T.float32(2.0**-19))
    for i in T.unroll(ASKED):
        part = T.alloc_local((1,), "float32")
        part[0] = r.asked_sum[i]
        reduce_block(r, part, added)
        r.asked_mass[i] = T.cast(part[0] * T.float32(2.0**40), "int64")


@T.macro
def choose_rival(r, token, is_sure):
    """After `draw_rivals` of a whole row: the row's token, if is_sure[0] becomes 1."""
    num_asked = T.alloc_local((1,), "int32")
    listed = T.alloc_local((1,), "int32")  # the rival that stays by the list; -1: none
    goes_on = T.alloc_local((1,), "int32")
    is_listed = T.alloc_local((1,), "int32")
    is_listed[0] = T.if_then_else(r.ints[LIST_SIZE] <= r.capacity, 1, 0)
    num_asked[0] = 0
    listed[0] = -1
    goes_on[0] = T.if_then_else(r.ints[QUEUE_SIZE] <= r.queue_capacity, 1, 0)
    if goes_on[0] == 1:
        _list_rivals(r)
    else:
        whole_branch(r)
    if is_listed[0] == 1:
        _sum_listed(r, T.uint64(0))
        share = T.cast(r.top_p[0], "float64") * T.cast(r.sum_above[0], "float64")
        r.threshold[0] = T.cast(T.floor(share), "int64")
    else:
        whole_branch(r)
    r.best[0] = ~T.uint64(0)
    while goes_on[0] == 1:
        _next_rival(r)
        if r.best[0] == T.uint64(0):
            goes_on[0] = 0
        else:
            rival = keep(packed_token(r, r.best[0]))
            score = keep(r.logits[r.row, rival] * r.scale[0])
            if is_listed[0] == 1 and score > r.least_listed[0]:
                _sum_listed(r, pack(r, score, rival))
                if r.sum_above[0] <= r.threshold[0]:
                    listed[0] = rival
                    goes_on[0] = 0
            else:
                whole_branch(r)
            if goes_on[0] == 1:
                _note(r, num_asked[0], score, rival)
                num_asked[0] = num_asked[0] + 1
                goes_on[0] = T.if_then_else(num_asked[0] < ASKED, 1, 0)
            else:
                whole_branch(r)
    goes_on[0] = 1
    if num_asked[0] > 0:
        _ask(r, num_asked[0])
        share = T.cast(r.top_p[0], "float64") * T.cast(r.mass_all[0], "float64")
        r.threshold[0] = T.cast(T.floor(share), "int64")
        for i in T.serial(ASKED):
            if i < num_asked[0] and goes_on[0] == 1:
                if r.asked_mass[i] <= r.threshold[0] + r.doubt[0]:
                    goes_on[0] = 0
                if r.asked_mass[i] <= r.threshold[0] - r.doubt[0]:
                    is_sure[0] = 1
                    token[0] = r.asked_token[i]
    else:
        whole_branch(r)
    if goes_on[0] == 1 and listed[0] >= 0:
        is_sure[0] = 1
        token[0] = listed[0]
