"""Edits and truncation of logits against token-by-token float64 references."""

from __future__ import annotations

import math

import pytest
import torch

from deepinfer.ops.cpu import context, set_num_threads
from deepinfer.sampling.logits import edit_logits, truncate
from tests.sampling.rows import Row, brute_scores, brute_survivors, make_inputs
from tests.support.compare import assert_same_bits
from tilelang_ops.sampling.truncate_scores.reference import exp_mass
from tilelang_ops.sampling.truncate_scores.reference import run as truncate_reference


def survivors(scores: torch.Tensor, rows: list[Row]) -> list[set[int]]:
    """Tokens that the kernel keeps, after seeing that the reference keeps the same ones."""
    inputs = make_inputs(rows)
    cut = truncate(scores, inputs.top_k, inputs.top_p, inputs.min_p)
    in_place = scores.clone()
    assert truncate(in_place, inputs.top_k, inputs.top_p, inputs.min_p, out=in_place) is in_place
    assert_same_bits(in_place, cut)
    options = inputs.top_k, inputs.top_p, inputs.min_p
    assert_same_bits(cut, truncate_reference(scores, *options, torch.empty_like(scores)))
    return [set(row.nonzero().squeeze(-1).tolist()) for row in cut > -torch.inf]


EDITS = [
    Row(),
    Row(repetition=1.3, prompt=(1, 2, 3), output=(3, 5, 5)),
    Row(repetition=0.7, prompt=(0,), output=(6,)),
    Row(presence=0.5, prompt=(1, 2), output=(2, 4, 4)),
    Row(frequency=-0.25, output=(4, 4, 4, 7)),
    Row(repetition=1.1, presence=1.0, frequency=0.5, prompt=(0, 1), output=(1, 1, 2)),
    Row(bias={2: 5.0, 3: -math.inf, 0: -1.5}),
    Row(bans=(1, 1, 7)),
    Row(allowed=(2, 5)),
    Row(allowed=(2,), bans=(2,)),
    Row(allowed=(0, 3, 4), bias={3: 2.0, 1: 100.0}, bans=(4,), repetition=2.0, output=(0, 3)),
    Row(presence=2.0, prompt=(1,)),
]


@pytest.mark.parametrize("banned", [(), (0, 6)])
def test_edits_equal_brute_force(banned):
    vocab_size = 8
    logits = torch.randn(len(EDITS), vocab_size) * 3
    mask = None
    if banned:
        mask = torch.zeros(vocab_size, dtype=torch.bool)
        mask[list(banned)] = True
    before = logits.clone()
    edited = edit_logits(logits, make_inputs(EDITS), mask)
    assert_same_bits(logits, before)
    for values, row, found in zip(logits.tolist(), EDITS, edited.double()):
        expected = brute_scores(values, row.with_(temperature=0.0), frozenset(banned))
        torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=1e-6, atol=1e-6)


def test_repetition_counts_the_prompt_and_the_others_do_not():
    logits = torch.tensor([[2.0, -2.0, 2.0, -2.0]])
    row = Row(repetition=2.0, prompt=(0, 1))
    assert edit_logits(logits, make_inputs([row])).tolist() == [[1.0, -4.0, 2.0, -2.0]]
    row = Row(presence=1.0, frequency=1.0, prompt=(0, 1))
    assert edit_logits(logits, make_inputs([row])).tolist() == logits.tolist()


def test_nothing_to_edit_returns_the_logits():
    logits = torch.randn(2, 5)
    assert edit_logits(logits, make_inputs([Row(top_k=2), Row(temperature=0.0)])) is logits


CUTS = [
    Row(top_p=p, top_k=k, min_p=m)
    for p in (1.0, 0.999, 0.9, 0.5, 0.05, 1e-6)
    for k in (-1, 1, 3, 31, 32, 33, 200, 10**6)
    for m in (0.0, 1e-4, 0.1, 1.0)
]


@pytest.mark.parametrize("spread", [0.02, 1.0, 4.0, 30.0])
@pytest.mark.parametrize("vocab_size", [1, 2, 31, 32, 33, 300])
def test_truncation_equals_brute_force(spread, vocab_size):
    scores = torch.randn(len(CUTS), vocab_size) * spread
    found = survivors(scores, CUTS)
    for values, row, kept in zip(scores.tolist(), CUTS, found):
        assert kept == set(brute_survivors(values, row)), f"{row} of {vocab_size}"


def test_truncation_of_ties_keeps_the_lower_ids():
    """Few distinct values, so that every cut falls among equals; also across the short prefix."""
    scores = torch.randint(0, 4, (len(CUTS), 120)).float() * 0.5
    scores[::3] = 0.0
    scores[1::3, 60:] = -torch.inf
    for values, row, kept in zip(scores.tolist(), CUTS, survivors(scores, CUTS)):
        assert kept == set(brute_survivors(values, row)), row


def test_both_zeros_are_one_value():
    scores = torch.tensor([[-0.0, 0.0, -0.0, 0.0, -1.0]])
    assert survivors(scores, [Row(top_k=2)]) == [{0, 1}]
    assert survivors(scores, [Row(top_k=3)]) == [{0, 1, 2}]
    assert survivors(-scores, [Row(top_k=3)]) == [{4, 0, 1}]


def test_top_p_keeps_a_token_whose_mass_before_equals_it():
    """Four equal tokens: the mass before the third is exactly one half."""
    scores = torch.zeros(1, 4)
    assert survivors(scores, [Row(top_p=0.5)]) == [{0, 1, 2}]
    assert survivors(scores, [Row(top_p=0.499)]) == [{0, 1}]
    assert survivors(scores, [Row(top_p=0.01)]) == [{0}]


def test_top_p_counts_mass_among_the_top_k():
    """p = (.4, .3, .2, .1): of the first three, .4/.9 and .7/.9 lie before the second and third."""
    scores = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    assert survivors(scores, [Row(top_p=0.75)]) == [{0, 1, 2}]
    assert survivors(scores, [Row(top_p=0.75, top_k=3)]) == [{0, 1}]
    assert survivors(scores, [Row(top_p=0.75, min_p=0.3)]) == [{0, 1}]


def test_min_p_one_keeps_the_maxima_only():
    scores = torch.tensor([[1.0, 3.0, 3.0, 2.0]])
    assert survivors(scores, [Row(min_p=1.0)]) == [{1, 2}]


def test_masked_tokens_never_survive():
    scores = torch.tensor([[-torch.inf, 1.0, -torch.inf, 0.0]])
    for row in (Row(top_k=3), Row(top_k=4), Row(top_p=0.999), Row(min_p=1e-6)):
        assert survivors(scores, [row]) == [{1, 3}], row
    assert survivors(torch.full((1, 4), -torch.inf), [Row(top_k=2)]) == [set()]


def test_truncated_scores_keep_their_bits():
    scores = torch.randn(6, 50)
    inputs = make_inputs([Row(top_k=7)] * 6)
    cut = truncate(scores, inputs.top_k, inputs.top_p, inputs.min_p)
    kept = cut > -torch.inf
    assert kept.sum(-1).tolist() == [7] * 6
    assert_same_bits(cut[kept], scores[kept])


def test_a_row_does_not_depend_on_its_batch():
    scores = torch.randn(len(CUTS), 700) * torch.tensor([0.1, 1.0, 5.0, 20.0]).repeat(len(CUTS) // 4)[:, None]
    together = survivors(scores, CUTS)
    alone = [survivors(scores[i : i + 1], CUTS[i : i + 1])[0] for i in range(len(CUTS))]
    assert together == alone
    order = torch.randperm(len(CUTS)).tolist()
    assert survivors(scores[order], [CUTS[i] for i in order]) == [together[i] for i in order]


def test_masses():
    """exp in units of 2**-40 within float32's precision, exact at 0, nothing far below, in any place."""
    x = -torch.cat([torch.rand(20_000) * 30, torch.tensor([0.0, 27.7, 27.8, 59.9, 60.0, 1e9, torch.inf])])
    mass = exp_mass(x)
    exact = torch.exp(x.double()) * 2.0**40
    assert ((mass - exact).abs() <= 2e-7 * exact + 1).all()
    assert mass[20_000] == 2**40 and (mass[-3:] == 0).all()
    assert torch.equal(exp_mass(x[7:20]), mass[7:20])


def test_threads_change_nothing():
    scores = torch.randn(len(CUTS), 900) * 3
    together = survivors(scores, CUTS)
    before = context().num_threads
    try:
        for num_threads in (1, 3):
            set_num_threads(num_threads)
            assert survivors(scores, CUTS) == together
    finally:
        set_num_threads(before)


def test_broken_rows_leave_others_alone():
    scores = torch.randn(5, 40)
    rows = [Row(top_p=0.5, top_k=9, min_p=0.01)] * 5
    inputs = make_inputs(rows)
    expected = truncate(scores, inputs.top_k, inputs.top_p, inputs.min_p)
    scores[1, 4], scores[2, 5] = torch.nan, torch.inf
    scores[3] = torch.nan
    found = truncate(scores, inputs.top_k, inputs.top_p, inputs.min_p)
    assert_same_bits(found[[0, 4]], expected[[0, 4]])


def test_large_vocabulary():
    """The release's vocabulary: a nearly flat row whose nucleus reaches far, and a peaked one."""
    scores = torch.randn(2, 129_280)
    scores[1] *= 12
    rows = [Row(top_p=0.9), Row(top_p=0.9)]
    for values, row, kept in zip(scores.tolist(), rows, survivors(scores, rows)):
        expected = brute_survivors(values, row)
        # The integer masses may move a cut by the few tokens that weigh less than their rounding.
        assert kept ^ set(expected) <= set(expected[-3:]) | (kept - set(expected))
        assert abs(len(kept) - len(expected)) <= 3
