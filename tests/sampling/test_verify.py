"""Coupled verification reproduces plain sampling; ratio verification reproduces its law."""

from __future__ import annotations

import random

import pytest
import torch

from deepinfer.sampling import verify
from deepinfer.sampling.draw import gumbel_argmax
from deepinfer.sampling.philox import Domain
from deepinfer.sampling.sampler import Sampler
from deepinfer.sampling.verify import drafts_that_stand, leading_run, ratio_verify
from tests.sampling.rows import Row, assert_distribution, make_inputs

P = torch.tensor([0.45, 0.25, 0.05, 0.25])
Q = torch.tensor([0.30, 0.05, 0.45, 0.20])
NUM_DRAWS = 200_000
SEED = 0x0123456789ABCDEF
TARGET = (2.0, 1.0, 0.5, 0.0, -0.5, -1.0, -2.0, -3.0)
DRAFT = (1.2, 1.6, 0.4, 0.3, -0.9, -0.8, -2.2, -2.5)


def repeated(probabilities: torch.Tensor, count: int = NUM_DRAWS) -> torch.Tensor:
    return probabilities.log().expand(count, -1).contiguous()


def coupled_acceptance(p: list[float], q: list[float]) -> float:
    """A(p, q) by its definition: sum over i of 1 / sum over j of max(p_j / p_i, q_j / q_i)."""
    size = range(len(p))
    return sum(1 / sum(max(p[j] / p[i], q[j] / q[i]) for j in size) for i in size if p[i] > 0 and q[i] > 0)


def test_leading_run_equals_a_loop():
    for _ in range(300):
        lengths = [random.randrange(0, 7) for _ in range(random.randrange(1, 9))]
        passed = [random.random() < 0.7 for _ in range(sum(lengths))]
        offsets, expected = [0], []
        for length in lengths:
            run = passed[offsets[-1] : offsets[-1] + length]
            expected.append((run + [False]).index(False))
            offsets.append(offsets[-1] + length)
        found = leading_run(torch.tensor(passed, dtype=torch.bool), torch.tensor(offsets, dtype=torch.int32))
        assert found.tolist() == expected and found.dtype == torch.int32


def test_drafts_that_stand():
    tokens = torch.tensor([3, 4, 0, 5, 0], dtype=torch.int32)
    drafts = torch.tensor([3, 5, 0, -1, 0], dtype=torch.int32)
    faults = torch.tensor([0, 0, 1, 0, 0], dtype=torch.uint8)
    assert drafts_that_stand(tokens, drafts, faults).tolist() == [True, False, False, False, True]


@pytest.mark.parametrize(("temperature", "prefix"), [(1.0, 4), (0.7, 4)])
def test_reference_prefix(temperature, prefix):
    """The published example: 12 drafts by the draft logits, tested by 12 rows and a bonus row."""
    rows = [Row(seed=SEED, index=t, temperature=temperature) for t in range(17, 30)]
    sampler = Sampler(8)
    drafts = sampler.sample(torch.tensor([DRAFT] * 13), make_inputs(rows)).token_ids
    drafts[12] = -1
    found = sampler.sample(torch.tensor([TARGET] * 13), make_inputs(rows))
    passed = drafts_that_stand(found.token_ids, drafts, found.faults)
    assert leading_run(passed, torch.tensor([0, 13])).tolist() == [prefix]


@pytest.mark.parametrize(
    ("p", "q", "expected"),
    [
        ((0.5, 0.3, 0.2), (0.2, 0.5, 0.3), 0.693548),
        ((0.45, 0.25, 0.05, 0.25), (0.30, 0.05, 0.45, 0.20), 0.533946),
        ((0.7, 0.3), (0.5, 0.5), 0.8),
    ],
)
def test_coupled_acceptance_rate(p, q, expected):
    assert coupled_acceptance(p, q) == pytest.approx(expected, abs=1e-6)
    seeds, index = torch.full((NUM_DRAWS,), 4), torch.arange(NUM_DRAWS)
    target = gumbel_argmax(repeated(torch.tensor(p)), seeds, index)
    draft = gumbel_argmax(repeated(torch.tensor(q)), seeds, index)
    rate = (target == draft).double().mean().item()
    assert rate == pytest.approx(expected, abs=4 * (expected * (1 - expected) / NUM_DRAWS) ** 0.5)


def model(prefix: list[int], vocab_size: int) -> torch.Tensor:
    """Logits after a prefix: any fixed function of it."""
    generator = torch.Generator().manual_seed(hash(tuple(prefix[-3:])) % 2**31)
    return torch.randn(vocab_size, generator=generator) * 1.5


@pytest.mark.parametrize("options", [{}, {"temperature": 0.7, "top_p": 0.9}, {"temperature": 0.0},
                                     {"presence": 1.5, "repetition": 1.3}])  # fmt: skip
def test_coupled_decoding_is_plain_decoding(options):
    """Whole outputs with any draft lengths and drafts of any quality equal token-by-token decoding."""
    vocab_size, length = 11, 60
    sampler = Sampler(vocab_size)

    def row(output: list[int], drafted: list[int]) -> Row:
        return Row(seed=99, index=5 + len(output) + len(drafted), output=(*output, *drafted), **options)

    def decode(max_drafts: int, error: float) -> tuple[list[int], int]:
        output: list[int] = []
        accepted = 0
        while len(output) < length:
            drafts: list[int] = []
            for _ in range(random.randint(0, max_drafts)):
                logits = model(output + drafts, vocab_size) + error * torch.randn(vocab_size)
                found = sampler.sample(logits[None], make_inputs([row(output, drafts)]))
                drafts.append(int(found.token_ids))
            rows = [row(output, drafts[:j]) for j in range(len(drafts) + 1)]
            logits = torch.stack([model(output + drafts[:j], vocab_size) for j in range(len(drafts) + 1)])
            found = sampler.sample(logits, make_inputs(rows, [0, len(rows)]))
            tested = torch.tensor([*drafts, -1], dtype=torch.int32)
            passed = drafts_that_stand(found.token_ids, tested, found.faults)
            count = int(leading_run(passed, torch.tensor([0, len(rows)])))
            output += found.token_ids[: count + 1].tolist()
            accepted += count
        return output[:length], accepted

    plain, none = decode(0, 0.0)
    assert none == 0
    for max_drafts, error in ((5, 0.0), (3, 0.5), (5, 2.0), (1, 10.0)):
        output, accepted = decode(max_drafts, error)
        assert output == plain
        assert accepted > 0


def ratio_first_tokens(target: torch.Tensor, draft: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Emitted first tokens and whether the draft stood, over consecutive indices."""
    seeds, index = torch.full((NUM_DRAWS,), 31), torch.arange(NUM_DRAWS)
    drafts = gumbel_argmax(draft, seeds, index, Domain.DRAFT).int()
    passed, tokens = ratio_verify(target, draft, drafts, seeds, index)
    return torch.where(passed, drafts, tokens), passed


def test_ratio_law_and_acceptance():
    tokens, passed = ratio_first_tokens(repeated(P), repeated(Q))
    assert_distribution(tokens, P.tolist())
    expected = torch.minimum(P, Q).sum().item()
    assert passed.double().mean().item() == pytest.approx(expected, abs=0.005)


@pytest.mark.parametrize(
    ("p", "q"),
    [
        ((0.0, 0.6, 0.4, 0.0), (0.5, 0.0, 0.5, 0.0)),  # truncated differently
        ((0.2, 0.3, 0.5, 0.0), (0.2, 0.3, 0.5, 0.0)),  # equal: everything is accepted
        ((1.0, 0.0, 0.0, 0.0), (0.25, 0.25, 0.25, 0.25)),
        ((0.97, 0.01, 0.01, 0.01), (0.01, 0.01, 0.01, 0.97)),
    ],
)
def test_ratio_law_of_truncated_distributions(p, q):
    tokens, _ = ratio_first_tokens(repeated(torch.tensor(p)), repeated(torch.tensor(q)))
    assert_distribution(tokens, list(p))


def test_shared_noise_would_be_biased(monkeypatch):
    """The known bug, made on purpose: the residual drawn with the draft's own noise has another law."""

    class Shared:
        ACCEPT, FRESH, RESIDUAL = Domain.ACCEPT, Domain.FRESH, Domain.DRAFT

    monkeypatch.setattr(verify, "Domain", Shared)
    tokens, _ = ratio_first_tokens(repeated(P), repeated(Q))
    found = (torch.bincount(tokens.long()) / NUM_DRAWS).tolist()
    assert found == pytest.approx([0.417, 0.309, 0.050, 0.225], abs=0.004)
    with pytest.raises(AssertionError, match="chi-square"):
        assert_distribution(tokens, P.tolist())


def test_ratio_with_certain_drafts():
    """Proposals without probabilities: accepted with p(x), and the law stays."""
    seeds, index = torch.full((NUM_DRAWS,), 8), torch.arange(NUM_DRAWS)
    drafts = torch.randint(0, 4, (NUM_DRAWS,), dtype=torch.int32)
    passed, tokens = ratio_verify(repeated(P), None, drafts, seeds, index)
    assert_distribution(torch.where(passed, drafts, tokens), P.tolist())
    for x in range(4):
        rate = passed[drafts == x].double().mean().item()
        assert rate == pytest.approx(P[x].item(), abs=0.01)


def test_ratio_joint_law_of_two_positions():
    """Two tokens, the second's law depending on the first, with drafts for both in one step or in two."""
    second_p = torch.tensor([[0.7, 0.2, 0.1], [0.1, 0.1, 0.8], [0.3, 0.4, 0.3]])
    second_q = torch.tensor([[0.2, 0.5, 0.3], [0.3, 0.3, 0.4], [0.3, 0.4, 0.3]])
    p, q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.5, 0.3])
    seeds, index = torch.arange(NUM_DRAWS), torch.full((NUM_DRAWS,), 700)
    first_draft = gumbel_argmax(repeated(q), seeds, index, Domain.DRAFT).int()
    second_draft = gumbel_argmax(second_q[first_draft.long()].log(), seeds, index + 1, Domain.DRAFT).int()
    passed, tokens = ratio_verify(repeated(p), repeated(q), first_draft, seeds, index)
    first = torch.where(passed, first_draft, tokens)
    # Where the first draft stood its successor is tested in the same step; else the next step drafts again.
    again = gumbel_argmax(second_q[first.long()].log(), seeds, index + 1, Domain.DRAFT).int()
    drafts = torch.where(passed, second_draft, again)
    target, draft = second_p[first.long()].log(), second_q[first.long()].log()
    passed, tokens = ratio_verify(target, draft, drafts, seeds, index + 1)
    second = torch.where(passed, drafts, tokens)
    joint = (p[:, None] * second_p).flatten().tolist()
    assert_distribution(first * 3 + second, joint)


def test_ratio_bonus_rows_draw_afresh():
    seeds, index = torch.full((NUM_DRAWS,), 31), torch.arange(NUM_DRAWS)
    none = torch.full((NUM_DRAWS,), -1, dtype=torch.int32)
    passed, tokens = ratio_verify(repeated(P), repeated(Q), none, seeds, index)
    assert not passed.any()
    assert_distribution(tokens, P.tolist())
    assert torch.equal(tokens, gumbel_argmax(repeated(P), seeds, index, Domain.FRESH).int())


def test_ratio_refuses_the_impossible():
    """A draft that p or q excludes is refused, and an empty residual falls back to p."""
    seeds, index = torch.arange(64), torch.arange(64)
    p = repeated(torch.tensor([0.5, 0.5, 0.0]), 64)
    q = repeated(torch.tensor([0.5, 0.5, 0.0]), 64)
    drafts = torch.full((64,), 2, dtype=torch.int32)
    passed, tokens = ratio_verify(p, q, drafts, seeds, index)
    assert not passed.any()
    assert set(tokens.tolist()) == {0, 1}


def test_ratio_refuses_a_draft_that_q_excludes():
    """It cannot have been drawn from q; accepting it would count its mass twice."""
    seeds, index = torch.arange(64), torch.arange(64)
    drafts = torch.full((64,), 2, dtype=torch.int32)
    p, q = repeated(torch.tensor([0.2, 0.2, 0.6]), 64), repeated(torch.tensor([0.5, 0.5, 0.0]), 64)
    assert not ratio_verify(p, q, drafts, seeds, index)[0].any()


def test_ratio_rows_are_independent_of_the_batch():
    target, draft = torch.randn(40, 30), torch.randn(40, 30)
    drafts = torch.randint(-1, 30, (40,), dtype=torch.int32)
    seeds, index = torch.arange(40), torch.arange(40)
    passed, tokens = ratio_verify(target, draft, drafts, seeds, index)
    for r in range(40):
        rows = slice(r, r + 1)
        alone = ratio_verify(target[rows], draft[rows], drafts[rows], seeds[rows], index[rows])
        assert (alone[0].item(), alone[1].item()) == (passed[r].item(), tokens[r].item())
