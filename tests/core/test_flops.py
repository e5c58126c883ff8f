"""Closed forms of the work model against sums over queries."""

from __future__ import annotations

import random

import pytest

from tests.core.harness import core, make_config, make_engine


def brute_force(terms, begin: int, end: int) -> float:
    return sum(f * min((p + 1 + o) // d, c) for p in range(begin, end) for f, d, o, c in terms)


def test_attention_flops_equals_the_sum(seed):
    rng = random.Random(seed)
    for _ in range(200):
        terms = [
            (
                float(rng.randint(1, 9)),
                rng.choice([1, 2, 3, 8, 16]),
                rng.choice([0, 0, 1, 7, 30]),
                rng.choice([0, 1, 5, 128, 10**9]),
            )
            for _ in range(rng.randint(1, 4))
        ]
        engine = make_engine(attention_terms=terms)
        begin = rng.randint(0, 300)
        end = begin + rng.choice([0, 1, 2, rng.randint(0, 400)])
        assert engine.attention_flops(begin, end) == brute_force(terms, begin, end), (
            f"{terms=} {begin=} {end=}"
        )


def test_candidate_blocks_of_the_release():
    """B * min(floor((t + ratio (B - 1)) / (ratio B)), C), the form that the terms were made for."""
    ratio, size, limit = 2, 8, 5
    engine = make_engine(attention_terms=[(size, ratio * size, ratio * (size - 1), limit)])
    for t in range(1, 200):
        expected = size * min((t + ratio * (size - 1)) // (ratio * size), limit)
        assert engine.attention_flops(t - 1, t) == expected


@pytest.mark.parametrize("term", [(-1.0, 1, 0, 1), (1.0, 0, 0, 1), (1.0, 1, -1, 1), (1.0, 1, 0, -1)])
def test_bad_terms_are_refused(term):
    with pytest.raises(ValueError, match="attention term"):
        make_engine(attention_terms=[term])


def test_terms_read_back():
    assert make_config(attention_terms=[(1.0, 2, 3, 4)]).attention_terms == [(1.0, 2, 3, 4)]
    with pytest.raises(ValueError, match="flops_per_token"):
        core.EngineCore(make_config(flops_per_token=0.0))
