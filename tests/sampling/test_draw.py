"""The Gumbel draw: the same bits by both ways, the right law, ties and dead rows."""

from __future__ import annotations

import pytest
import torch

from deepinfer.sampling import draw
from deepinfer.sampling.draw import gumbel_argmax
from deepinfer.sampling.philox import gumbel, row_words
from tests.sampling.rows import assert_distribution, brute_noise


def plain_argmax(scores: torch.Tensor, seeds: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """The definition: noise of every token, one addition, the first maximum."""
    return (scores + gumbel(row_words(seeds, index, scores.shape[1]))).argmax(-1)


@pytest.mark.parametrize("spread", [0.0, 1e-3, 1.0, 5.0, 40.0, 1e5])
@pytest.mark.parametrize("vocab_size", [1, 3, 4, 257, 2048])
def test_bound_keeps_every_winner(spread, vocab_size):
    scores = torch.randn(64, vocab_size) * spread
    scores[::4] -= 1e4
    seeds, index = torch.randint(-(2**63), 2**63 - 1, (64,)), torch.randint(0, 2**20, (64,))
    expected = plain_argmax(scores, seeds, index)
    assert torch.equal(gumbel_argmax(scores, seeds, index), expected)


@pytest.mark.parametrize("share", [0.0, 2.0])
def test_both_ways_give_the_same_tokens(share, monkeypatch):
    """Through pairs only, and through whole rows only."""
    scores = torch.randn(40, 500) * 4
    scores[torch.rand(40, 500) < 0.8] = -torch.inf
    scores[:, 3] = 0.0
    seeds, index = torch.randint(0, 2**62, (40,)), torch.arange(40)
    monkeypatch.setattr(draw, "PAIR_SHARE", share)
    assert torch.equal(gumbel_argmax(scores, seeds, index), plain_argmax(scores, seeds, index))


def test_chunks_of_rows_change_nothing(monkeypatch):
    scores = torch.randn(33, 300)
    seeds, index = torch.randint(0, 2**62, (33,)), torch.arange(33)
    expected = gumbel_argmax(scores, seeds, index)
    for groups in (1, 75, 76, 1000):
        monkeypatch.setattr(draw, "GROUPS_AT_ONCE", groups)
        assert torch.equal(gumbel_argmax(scores, seeds, index), expected)


@pytest.mark.parametrize("probabilities", [(0.45, 0.25, 0.05, 0.25), (0.999, 0.001), (0.0, 0.3, 0.0, 0.7)])
def test_law_over_indices_and_seeds(probabilities):
    num_draws = 200_000
    scores = torch.tensor(probabilities).log().expand(num_draws, -1).contiguous()
    seeds = torch.full((num_draws,), 77)
    index = torch.arange(num_draws)
    assert_distribution(gumbel_argmax(scores, seeds, index), list(probabilities))
    assert_distribution(gumbel_argmax(scores, index, seeds), list(probabilities))


def test_law_of_many_tokens():
    logits = torch.randn(60) * 2
    num_draws = 200_000
    tokens = gumbel_argmax(logits.expand(num_draws, -1), torch.arange(num_draws), torch.arange(num_draws) % 7)
    assert_distribution(tokens, torch.softmax(logits.double(), -1).tolist())


def test_consecutive_tokens_are_independent():
    """Joint law of the tokens at t and t + 1 of one seed."""
    num_draws = 100_000
    probabilities = torch.tensor([0.5, 0.3, 0.2])
    scores = probabilities.log().expand(num_draws, -1).contiguous()
    seeds = torch.arange(num_draws)
    first = gumbel_argmax(scores, seeds, torch.full_like(seeds, 8))
    second = gumbel_argmax(scores, seeds, torch.full_like(seeds, 9))
    assert_distribution(first * 3 + second, torch.outer(probabilities, probabilities).flatten().tolist())


def test_equal_perturbed_scores_go_to_the_lowest_id():
    """At 2**30 a float32 cannot hold the noise, so all perturbed scores are equal."""
    scores = torch.full((1, 6), 2.0**30)
    assert gumbel_argmax(scores, torch.tensor([3]), torch.tensor([4])).item() == 0
    scores[0, :2] = -torch.inf
    assert gumbel_argmax(scores, torch.tensor([3]), torch.tensor([4])).item() == 2


def test_dead_rows_give_zero_and_leave_others_alone():
    scores = torch.randn(4, 100)
    seeds, index = torch.arange(4), torch.arange(4)
    expected = gumbel_argmax(scores, seeds, index)
    scores[1] = -torch.inf
    scores[2] = torch.nan
    found = gumbel_argmax(scores, seeds, index)
    assert found[[0, 3]].tolist() == expected[[0, 3]].tolist()
    assert found[1] == 0 and found[2] == 0
    assert gumbel_argmax(scores[:0], seeds[:0], index[:0]).shape == (0,)


def test_noise_belongs_to_the_token_id():
    """Removing other tokens does not change a token's noise."""
    scores = torch.zeros(1, 40)
    seed, index = torch.tensor([12]), torch.tensor([5])
    noise = [brute_noise(12, 5, v) for v in range(40)]
    order = sorted(range(40), key=lambda v: -noise[v])
    for token in order[:-1]:
        assert gumbel_argmax(scores, seed, index).item() == token
        scores[0, token] = -torch.inf
