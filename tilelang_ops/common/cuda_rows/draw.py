"""The draw of a token: which may win by float32 noise, and the winner among them by exact noise."""

import tilelang.language as T

from tilelang_ops.common.cuda_noise import (
    keep,
    noise_exact,
    noise_near,
    philox_words_by_first_keys,
    philox_words_by_keys,
    put_keys,
)
from tilelang_ops.common.cuda_rows.row import (
    LOWEST,
    QUEUE_SIZE,
    larger,
    largest,
    ordered,
    pack,
    reduce_block,
    start_watch,
    unordered,
    watch,
    whole_branch,
)
from tilelang_ops.common.noise import ROUNDS


@T.macro
def set_stream(r, seed, index, domain):
    """The noise of the row's draw."""
    r.domain[0] = domain
    if r.thread < ROUNDS:
        put_keys(r.keys, seed, index, r.thread)
    else:
        whole_branch(r)
    if r.thread == 0:
        r.index[0] = index
    T.sync_threads()


@T.macro
def winner_bound(r):
    """Below the winner's perturbed score, by more than all rounding."""
    bound = unordered(r.bound[0])
    return bound - (T.float32(1e-3) + T.float32(1e-6) * T.abs(bound))


@T.macro
def keep_for_draw(r, base, group):
    """Queues those tokens of a group that may win a draw; scores of -inf stay out."""
    queue_group(r, base, group, r.bound, 0)


@T.macro
def queue_group(r, base, group, leads, at):
    """Queues those tokens of a group that may be above r.bound, and enters the best into leads[at]."""
    philox_words_by_keys(r.words, group, r.keys, r.domain[0])
    fewest = T.min(T.min(r.words[0], r.words[1]), T.min(r.words[2], r.words[3]))
    # A winner has -log(-log(1 - u)) >= bound - score; as -log(1 - u) >= u, u is at most exp(score - bound).
    most = T.__exp(largest(r.scores, base) - winner_bound(r)) * T.float32(2.0**32)
    if T.cast(fewest, "float32") <= most:
        for j in T.unroll(4):
            r.near[j] = r.scores[base + j] + noise_near(r.words[j])
        T.atomic_max(leads[at], ordered(largest(r.near, 0)))
        least = winner_bound(r)
        for j in T.unroll(4):
            if r.near[j] >= least and r.scores[base + j] >= T.float32(LOWEST):
                slot = T.atomic_add(r.ints[QUEUE_SIZE], 1, return_prev=True)
                if slot < r.queue_capacity:
                    r.queue[slot] = group * 4 + j
            else:
                whole_branch(r)
    else:
        whole_branch(r)


@T.macro
def start_draw(r):
    """Before the first `keep_for_draw`; the caller synchronises."""
    if r.thread == 0:
        r.bound[0] = ordered(-T.infinity("float32"))
        r.ints[QUEUE_SIZE] = 0
    else:
        whole_branch(r)


@T.macro
def word_of(r, token):
    """The Philox word of one token."""
    philox_words_by_first_keys(r.words, token >> 2, r.keys, r.index[0], r.domain[0])
    word = T.alloc_local((1,), "uint32")
    word[0] = r.words[0]
    for j in (1, 2, 3):
        if (token & 3) == j:
            word[0] = r.words[j]
    return word[0]


@T.macro
def _try_all(r, score_at):
    """Enters every token that stays into this thread's best: slow, for a queue that was too short."""
    at = T.alloc_local((1,), "int32")
    at[0] = r.thread
    while at[0] < r.vocab:
        score = keep(score_at(r, at[0]))
        key = pack(r, score, at[0])
        if score >= r.floor[0] and key >= r.cut[0]:
            word = word_of(r, at[0])
            near = keep(score + noise_near(word))
            if near >= winner_bound(r):
                T.atomic_max(r.bound[0], ordered(near))
                r.best[0] = T.max(r.best[0], pack(r, score + noise_exact(word), at[0]))
            else:
                whole_branch(r)
        else:
            whole_branch(r)
        at[0] = at[0] + r.num_threads


@T.macro
def _score_at(r, token):
    return r.logits[r.row, token] * r.scale[0]


@T.macro
def finish_draw(r, score_at=_score_at):
    """The winner among the queued tokens, as a key in r.best.

    score_at: macro (r, token) -> the score of a token.
    """
    at = T.alloc_local((1,), "int32")
    r.best[0] = T.uint64(0)
    T.sync_threads()
    if r.ints[QUEUE_SIZE] <= r.queue_capacity:
        at[0] = r.thread
        while at[0] < r.ints[QUEUE_SIZE]:
            token = keep(r.queue[at[0]])
            score = keep(score_at(r, token))
            word = word_of(r, token)
            r.best[0] = T.max(r.best[0], pack(r, score + noise_exact(word), token))
            at[0] = at[0] + r.num_threads
    else:
        _try_all(r, score_at)
    reduce_block(r, r.best, larger)


@T.macro
def draw_group(r, base, group):
    """Of the walk of a draw from all tokens: watches, and queues what may win."""
    watch(r, base, group)
    if largest(r.scores, base) >= T.float32(LOWEST):
        keep_for_draw(r, base, group)
    else:
        whole_branch(r)


@T.macro
def start_plain_draw(r):
    """Before the walk of a draw from all tokens."""
    r.floor[0] = T.float32(LOWEST)
    r.cut[0] = T.uint64(0)
    start_draw(r)
    start_watch(r)
    T.sync_threads()
