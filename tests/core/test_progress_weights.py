"""The end of a batch: what ends last counts more, and no choice is better by that measure."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from tests.core.harness import make_params, tokens_of
from tests.core.test_draft_budget import make_budget, propose, survivals_of, tokens_per_step

FIXED, EACH = 6.0, 1.0  # ms of a plain step


def points(num_seqs: int, k: int) -> list[tuple[int, int, float]]:
    """Steps that propose drafts: twice a plain step, and half a millisecond for each draft."""
    return [
        (n, n * width, 2 * (FIXED + EACH * n) + 0.5 * n * (width - 1))
        for n in (1, num_seqs)
        for width in (1, 1 + k)
    ]


def choose(confidences, max_tokens, num_waiting=0) -> list[int]:
    """Drafts that sequences with these limits verify, beside some that find no place."""
    num_seqs, k = np.shape(confidences)
    plain = [(n, FIXED + EACH * n) for n in (1, num_seqs)] if num_seqs > 1 else [(1, FIXED + EACH)]
    engine = make_budget(num_seqs, k, points(num_seqs, k) if num_seqs > 1 else points(2, k), plain)
    for limit in [*max_tokens, *[9] * num_waiting]:
        engine.add(make_params(max_tokens=limit), tokens_of(2))
    propose(engine, engine.schedule(), confidences)
    return (engine.schedule().seqlens_q - 1).tolist()


def weights_of(times: list[float]) -> list[float]:
    """A plain step is worth what it takes: EACH for every sequence, FIXED among those that are last."""
    last = [time >= 0.8 * max(times) for time in times]
    total = EACH * len(times) + FIXED
    return [len(times) / total * (EACH + FIXED / sum(last) * is_last) for is_last in last]


@pytest.mark.parametrize("case", range(60))
def test_no_choice_is_worth_more(case):
    rng = random.Random(case)
    num_seqs, k = rng.randint(2, 4), rng.randint(1, 3)
    confidences = [[rng.randint(1, 9) / 10 for _ in range(k)] for _ in range(num_seqs)]
    max_tokens = [rng.choice([8, 20, 40]) + rng.randint(0, 3) for _ in range(num_seqs)]
    lengths = choose(confidences, max_tokens)
    weights = weights_of([limit - 1 for limit in max_tokens])
    survivals = survivals_of(confidences)

    def rate(choice) -> float:
        worth = num_seqs + sum(w * s[:n].sum() for w, s, n in zip(weights, survivals, choice))
        return worth / (2 * (FIXED + EACH * num_seqs) + 0.5 * sum(choice))

    best = max(itertools.product(range(k + 1), repeat=num_seqs), key=rate)
    assert rate(lengths) == pytest.approx(rate(best), rel=1e-6), f"{lengths=} {best=}"


ALIKE = [[0.2, 0.9]] * 3


def test_drafts_go_to_the_sequence_that_ends_last():
    assert choose(ALIKE, [40, 20, 20]) == [2, 0, 0]
    assert choose(ALIKE, [40, 33, 20]) == [2, 2, 0], "39 and 32 tokens end at about the same time"


@pytest.mark.parametrize(("num_waiting", "counts_alike"), [(0, False), (1, False), (3, True), (7, True)])
def test_while_others_wait_every_token_counts_alike(num_waiting, counts_alike):
    """One that waits goes to a place that comes free early, which is then not among the last still."""
    lengths = choose(ALIKE, [60, 10, 10], num_waiting)
    assert (lengths[0] == lengths[1] == lengths[2]) == counts_alike, lengths


def test_one_sequence_alone_is_what_it_was():
    assert choose([[0.9, 0.9]], [30]) == [2]
    assert tokens_per_step([[0.9, 0.9]], [2]) == pytest.approx(2.71)
