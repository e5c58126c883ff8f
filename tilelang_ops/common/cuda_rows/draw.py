"""The draw of a token by Gumbel noise, among those that a walk keeps."""

import tilelang.language as T

from tilelang_ops.common.cuda_noise import keep, noise_exact, noise_near, philox_words
from tilelang_ops.common.cuda_rows.row import (
    LIST_SIZE,
    LOWEST,
    QUEUE_SIZE,
    larger,
    largest,
    ordered,
    pack,
    packed_score,
    packed_token,
    reduce_block,
    start_watch,
    unordered,
    walk,
    watch,
)


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
