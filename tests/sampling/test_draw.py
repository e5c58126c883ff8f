"""The Gumbel draw: the same bits by both ways, the right law, ties and dead rows."""

from __future__ import annotations

import pytest
import torch

from deepinfer.ops.cpu import context, set_num_threads
from deepinfer.sampling import draw
from deepinfer.sampling.draw import gumbel_argmax, native_candidates, torch_candidates
from deepinfer.sampling.philox import Domain, gumbel, row_words
from tests.sampling.rows import assert_distribution, brute_noise


def plain_argmax(scores: torch.Tensor, seeds: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """The definition: noise of every token, one addition, the first maximum."""
    return (scores + gumbel(row_words(seeds, index, scores.shape[1]))).argmax(-1)


@pytest.mark.parametrize("spread", [0.0, 1e-3, 1.0, 5.0, 40.0, 1e5])
@pytest.mark.parametrize("vocab_size", [1, 3, 4, 257, 2048])
def test_search_keeps_every_winner(spread, vocab_size):
    scores = torch.randn(64, vocab_size) * spread
    scores[::4] -= 1e4
    seeds, index = torch.randint(-(2**63), 2**63 - 1, (64,)), torch.randint(0, 2**20, (64,))
    expected = plain_argmax(scores, seeds, index)
    assert torch.equal(gumbel_argmax(scores, seeds, index), expected)


@pytest.mark.parametrize("search", [native_candidates, torch_candidates])
@pytest.mark.parametrize("domain", [Domain.CHOICE, Domain.FRESH])
def test_candidates_are_few_and_carry_their_words(search, domain):
    """Among them is every row's winner; masked tokens are not; each word is the token's own."""
    scores = torch.randn(40, 4099) * 3
    scores[torch.rand(40, 4099) < 0.5] = -torch.inf
    seeds, index = torch.randint(-(2**63), 2**63 - 1, (40,)), torch.randint(0, 2**40, (40,))
    found = search(scores, seeds, index, domain)
    words = row_words(seeds, index, 4099, domain)
    assert torch.equal(found.words, words[found.rows, found.tokens])
    assert (scores[found.rows, found.tokens] > -torch.inf).all()
    pairs = set(zip(found.rows.tolist(), found.tokens.tolist()))
    winners = (scores + gumbel(words)).argmax(-1).tolist()
    assert len(pairs) == found.rows.shape[0] < 40 * 400
    assert set(enumerate(winners)) <= pairs
    keys = found.rows * 4099 + found.tokens
    assert (keys.diff() > 0).all()


@pytest.mark.parametrize("spread", [0.0, 1.0, 8.0])
def test_both_searches_give_the_same_tokens(spread, monkeypatch):
    scores = torch.randn(50, 1000) * spread
    scores[10:, ::3] = -torch.inf
    scores[20:, 4:] = -torch.inf
    seeds, index = torch.randint(0, 2**62, (50,)), torch.arange(50)
    expected = plain_argmax(scores, seeds, index)
    assert torch.equal(gumbel_argmax(scores, seeds, index), expected)
    monkeypatch.setattr(draw, "native_candidates", torch_candidates)
    for groups in (1, 250, 251, 10**6):
        monkeypatch.setattr(draw, "GROUPS_AT_ONCE", groups)
        assert torch.equal(gumbel_argmax(scores, seeds, index), expected)


def test_rows_of_a_larger_tensor():
    """Strided rows, and a tail of the vocabulary beyond the last whole block of the kernel."""
    for vocab_size in (1, 127, 128, 129, 131, 260):
        wide = torch.randn(9, vocab_size + 5)
        seeds, index = torch.arange(18)[::2], torch.arange(18)[1::2]
        expected = plain_argmax(wide[:, 2:-3].contiguous(), seeds, index)
        assert torch.equal(gumbel_argmax(wide[:, 2:-3], seeds, index), expected)


def test_threads_change_nothing():
    scores = torch.randn(70, 3000)
    seeds, index = torch.arange(70), torch.arange(70)
    expected = gumbel_argmax(scores, seeds, index)
    before = context().num_threads
    try:
        for num_threads in (1, 3):
            set_num_threads(num_threads)
            assert torch.equal(gumbel_argmax(scores, seeds, index), expected)
    finally:
        set_num_threads(before)


def test_a_flat_row_of_the_release_vocabulary():
    """Every token can win; the search must not let all of them pass."""
    scores = torch.zeros(3, 129_280)
    seeds, index = torch.arange(3), torch.arange(3)
    assert torch.equal(gumbel_argmax(scores, seeds, index), plain_argmax(scores, seeds, index))
    assert native_candidates(scores, seeds, index, 0).rows.shape[0] < 3 * 400


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
