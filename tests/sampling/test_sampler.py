"""The sampler: reference vectors, brute force over all options, row invariance, faults, log-probabilities."""

from __future__ import annotations

import math
import random

import pytest
import torch

from deepinfer.sampling.logprobs import LogprobsMode
from deepinfer.sampling.sampler import Fault, Sampler, SampleResult
from tests.sampling.rows import (
    Row,
    assert_distribution,
    brute_choice,
    brute_scores,
    brute_survivors,
    log_softmax,
    make_inputs,
)
from tests.support.compare import assert_same_bits

SEED = 0x0123456789ABCDEF
TARGET = (2.0, 1.0, 0.5, 0.0, -0.5, -1.0, -2.0, -3.0)
DRAFT = (1.2, 1.6, 0.4, 0.3, -0.9, -0.8, -2.2, -2.5)
FIELDS = ("token_ids", "faults", "logprobs", "ranks", "top_ids", "top_logprobs")


def random_rows(count: int, vocab_size: int) -> list[Row]:
    """Rows with every option, most of them off in any one row."""
    rows = []
    for number in range(count):
        history = [random.randrange(vocab_size) for _ in range(random.randrange(12))]
        split = random.randrange(len(history) + 1)
        some = random.random
        rows.append(
            Row(
                seed=random.getrandbits(64),
                index=random.randrange(4000),
                temperature=random.choice([0.0, 1.0, 0.7, 1.7, 1e-4, 5.0]),
                top_p=random.choice([1.0, 1.0, 0.95, 0.6, 0.01]),
                top_k=random.choice([-1, -1, 1, 5, 40, vocab_size, 10**9]),
                min_p=random.choice([0.0, 0.0, 0.01, 0.3]),
                num_logprobs=random.choice([-1, -1, 0, 1, 4]),
                forced=random.randrange(vocab_size) if some() < 0.1 else -1,
                repetition=random.choice([1.0, 1.0, 1.4, 0.8]),
                presence=random.choice([0.0, 0.0, 1.1, -0.5]),
                frequency=random.choice([0.0, 0.0, 0.3]),
                prompt=tuple(history[:split]),
                output=tuple(history[split:]),
                bias={random.randrange(vocab_size): random.choice([4.0, -math.inf, -2.0])}
                if some() < 0.3
                else {},
                bans=tuple(random.sample(range(vocab_size), 3)) if some() < 0.3 else (),
                allowed=tuple(sorted(random.sample(range(vocab_size), 7))) if some() < 0.2 else None,
            )
        )
        if number % 10 == 0:
            rows[-1] = Row(seed=number, index=number)
    return rows


def same_result(found: SampleResult, expected: SampleResult, rows: list[int]) -> None:
    """`expected` (of the given rows alone) equals those rows of `found`, bit by bit where both report."""
    for name in FIELDS:
        one, two = getattr(found, name), getattr(expected, name)
        if two is None:
            continue
        one = one[rows]
        if two.dim() == 2:
            one = one[:, : two.shape[1]]
        assert_same_bits(one, two, name)


@pytest.mark.parametrize(("temperature", "target", "draft"), [
    (1.0, [1, 1, 0, 0, 0, 0, 0, 0, 1, 1, 0, 6], [1, 1, 0, 0, 3, 0, 0, 1, 1, 1, 0, 1]),
    (0.7, [1, 1, 0, 0, 0, 0, 0, 0, 1, 1, 0, 0], [1, 1, 0, 0, 1, 0, 0, 1, 1, 1, 0, 1]),
])  # fmt: skip
def test_reference_tokens(temperature, target, draft):
    rows = [Row(seed=SEED, index=t, temperature=temperature) for t in range(17, 29)]
    sampler = Sampler(8)
    for logits, expected in ((TARGET, target), (DRAFT, draft)):
        found = sampler.sample(torch.tensor([logits] * 12), make_inputs(rows))
        assert found.token_ids.tolist() == expected


def test_reference_frequencies():
    """Over t = 1000 ... 20999: the published match rate of target and draft, and target frequencies."""
    rows = make_inputs([Row(seed=SEED, index=t) for t in range(1000, 21000)])
    sampler = Sampler(8)
    target = sampler.sample(torch.tensor([TARGET] * 20000), rows).token_ids
    draft = sampler.sample(torch.tensor([DRAFT] * 20000), rows).token_ids
    assert (target == draft).float().mean().item() == pytest.approx(0.6958, abs=6e-5)
    frequencies = (torch.bincount(target.long(), minlength=8) / 20000).tolist()
    expected = [0.5308, 0.2001, 0.1168, 0.0714, 0.0423, 0.0257, 0.0089, 0.0039]
    assert frequencies == pytest.approx(expected, abs=6e-5)


@pytest.mark.parametrize("force_top_k", [0, 3])
def test_choices_equal_brute_force(force_top_k):
    vocab_size, banned = 97, frozenset({0, 50})
    rows = random_rows(300, vocab_size)
    logits = torch.randn(len(rows), vocab_size) * 3
    sampler = Sampler(vocab_size, banned_token_ids=banned, force_top_k=force_top_k)
    found = sampler.sample(logits, make_inputs(rows))
    for number, (values, row) in enumerate(zip(logits.tolist(), rows)):
        expected = row.forced if row.forced >= 0 else brute_choice(values, row, banned, force_top_k)
        assert found.faults[number] == (Fault.NO_TOKEN if expected < 0 else Fault.NONE), row
        assert found.token_ids[number] == max(expected, 0), row


@pytest.mark.parametrize("mode", list(LogprobsMode))
def test_logprobs_equal_brute_force(mode):
    vocab_size, banned = 61, frozenset({1})
    rows = random_rows(200, vocab_size)
    logits = torch.randn(len(rows), vocab_size) * 2
    found = Sampler(vocab_size, banned_token_ids=banned, logprobs_mode=mode).sample(logits, make_inputs(rows))
    checked = 0
    for number, (values, row) in enumerate(zip(logits.tolist(), rows)):
        if row.num_logprobs < 0 or found.faults[number]:
            continue
        scores = brute_scores(values, row, banned)
        if mode is LogprobsMode.RAW:
            scores = values
        elif max(scores) == -math.inf:
            continue  # a forced token of a row that masks forbid altogether
        elif mode is LogprobsMode.PROCESSED:
            kept = brute_survivors(scores, row) if row.temperature else [scores.index(max(scores))]
            scores = [s if t in kept else -math.inf for t, s in enumerate(scores)]
        expected = log_softmax(scores)
        token = int(found.token_ids[number])
        order = sorted(range(vocab_size), key=lambda t: (-scores[t], t))
        assert found.logprobs[number].item() == pytest.approx(expected[token], abs=2e-5, rel=1e-5)
        assert found.ranks[number] == order.index(token) + 1
        top = order[: row.num_logprobs]
        assert found.top_ids[number, : row.num_logprobs].tolist() == top
        found_top = found.top_logprobs[number, : row.num_logprobs].tolist()
        assert found_top == pytest.approx([expected[t] for t in top], abs=2e-5, rel=1e-5)
        checked += 1
    assert checked > 60


@pytest.mark.parametrize("mode", list(LogprobsMode))
def test_batch_equals_alone_bitwise(mode):
    vocab_size = 500
    rows = random_rows(60, vocab_size)
    logits = torch.randn(len(rows), vocab_size) * 4
    logits[7, 3] = torch.nan
    sampler = Sampler(vocab_size, banned_token_ids=range(5), logprobs_mode=mode)
    whole = make_inputs(rows)
    together = sampler.sample(logits, whole)
    for number, row in enumerate(rows):
        same_result(together, sampler.sample(logits[number : number + 1], make_inputs([row])), [number])
    order = random.sample(range(len(rows)), len(rows))
    same_result(together, sampler.sample(logits[order], make_inputs([rows[i] for i in order])), order)
    for start, stop in ((0, 1), (0, 60), (13, 41), (41, 60), (20, 20)):
        part = sampler.sample(logits[start:stop], whole.slice(start, stop))
        same_result(together, part, list(range(start, stop)))


@pytest.mark.parametrize("mode", list(LogprobsMode))
def test_scoring_a_token_equals_sampling_it(mode):
    """A forced row reports the very bits that the row which drew the token reported."""
    vocab_size = 300
    rows = [row.with_(forced=-1, num_logprobs=3) for row in random_rows(80, vocab_size)]
    logits = torch.randn(len(rows), vocab_size) * 3
    sampler = Sampler(vocab_size, logprobs_mode=mode)
    drawn = sampler.sample(logits, make_inputs(rows))
    forced = [row.with_(forced=int(token)) for row, token in zip(rows, drawn.token_ids)]
    scored = sampler.sample(logits, make_inputs(forced))
    sound = (drawn.faults == 0).nonzero().squeeze(-1).tolist()
    assert len(sound) > 70
    for name in FIELDS:
        assert_same_bits(getattr(scored, name)[sound], getattr(drawn, name)[sound], name)


def test_raw_logprobs_ignore_every_option():
    logits = torch.randn(1, 50)
    plain = Row(num_logprobs=5, forced=9)
    other = plain.with_(temperature=0.3, top_k=2, bans=(9,), repetition=3.0, prompt=(9,), bias={9: 7.0})
    sampler = Sampler(50, banned_token_ids=[1])
    same_result(
        sampler.sample(logits, make_inputs([plain])), sampler.sample(logits, make_inputs([other])), [0]
    )


def test_a_forbidden_forced_token_reports_the_floor():
    sampler = Sampler(4, logprobs_mode="processed")
    row = Row(forced=3, num_logprobs=0, bans=(3,))
    found = sampler.sample(torch.zeros(1, 4), make_inputs([row]))
    assert (found.token_ids.item(), found.faults.item(), found.logprobs.item()) == (3, 0, -9999.0)


@pytest.mark.parametrize("mode", list(LogprobsMode))
def test_a_forced_token_needs_no_choice(mode):
    row = Row(forced=2, num_logprobs=1, bans=(0, 1, 2, 3))
    found = Sampler(4, logprobs_mode=mode).sample(torch.zeros(1, 4), make_inputs([row]))
    assert (found.token_ids.item(), found.faults.item()) == (2, Fault.NONE)
    assert found.logprobs.item() == pytest.approx(math.log(0.25) if mode == "raw" else -9999.0)


def test_alternatives_with_both_zeros_go_by_id():
    logits = torch.tensor([[-1.0, -0.0, 0.0, -0.0, 0.0]])
    found = Sampler(5).sample(logits, make_inputs([Row(forced=3, num_logprobs=4)]))
    assert found.top_ids.tolist() == [[1, 2, 3, 4]]
    assert found.ranks.tolist() == [3]


def test_processed_greedy_row_is_certain():
    sampler = Sampler(4, logprobs_mode="processed")
    found = sampler.sample(
        torch.tensor([[0.0, 3.0, 3.0, 1.0]]), make_inputs([Row(temperature=0.0, num_logprobs=3)])
    )
    assert found.token_ids.item() == 1
    assert found.logprobs.item() == 0.0
    assert found.top_logprobs.tolist() == [[0.0, -9999.0, -9999.0]]


def test_more_alternatives_than_tokens():
    found = Sampler(3).sample(torch.zeros(2, 3), make_inputs([Row(num_logprobs=20), Row(num_logprobs=1)]))
    assert found.top_ids.tolist() == [[0, 1, 2]] * 2
    assert found.top_logprobs.exp().sum(-1).tolist() == pytest.approx([1.0, 1.0])


def test_nothing_is_computed_unasked():
    found = Sampler(5).sample(torch.randn(3, 5), make_inputs([Row()] * 3))
    assert found.logprobs is None and found.top_ids is None and found.ranks is None
    assert found.token_ids.dtype == torch.int32 and found.faults.dtype == torch.uint8


def test_greedy_ties_and_signed_zeros_go_to_the_lowest_id():
    logits = torch.tensor([[1.0, 2.0, 2.0], [-0.0, 0.0, 0.0], [0.0, -0.0, 0.0], [-1.0, -0.0, 0.0]])
    found = Sampler(3).sample(logits, make_inputs([Row(temperature=0.0)] * 4))
    assert found.token_ids.tolist() == [1, 0, 0, 1]
    wide = torch.zeros(2, 4099)
    wide[0, [77, 4098]] = wide[1, [4097, 4098]] = 1.0
    assert Sampler(4099).sample(wide, make_inputs([Row(temperature=0.0)] * 2)).token_ids.tolist() == [
        77,
        4097,
    ]


def test_faults_stay_in_their_rows():
    vocab_size = 20
    rows = [Row(seed=i, temperature=t, num_logprobs=2) for i in range(6) for t in (0.0, 1.0)]
    logits = torch.randn(len(rows), vocab_size)
    good = Sampler(vocab_size).sample(logits, make_inputs(rows))
    bad = logits.clone()
    bad[2:4, 7] = torch.nan
    bad[4:6, 3] = torch.inf
    bad[6:8] = -torch.inf
    bad[8:10, 1:] = -torch.inf
    rows[10:12] = [row.with_(bans=tuple(range(vocab_size))) for row in rows[10:12]]
    found = Sampler(vocab_size).sample(bad, make_inputs(rows))
    assert found.faults.tolist() == [0, 0, 1, 1, 1, 1, 1, 1, 0, 0, 2, 2]
    assert found.token_ids.tolist() == good.token_ids.tolist()[:2] + [0] * 10
    same_result(found, SampleResult(*(getattr(good, name)[:2] for name in FIELDS)), [0, 1])
    assert found.logprobs.isfinite().all() and found.top_logprobs.isfinite().all()


def test_nan_at_a_banned_token_is_a_fault():
    logits = torch.zeros(1, 4)
    logits[0, 2] = torch.nan
    assert (
        Sampler(4, banned_token_ids=[2]).sample(logits, make_inputs([Row()])).faults.item() == Fault.NUMERICS
    )


def test_overflow_of_a_penalty_is_a_fault():
    row = Row(repetition=1e-6, output=(0,))
    logits = torch.tensor([[3e38, 0.0]])
    assert Sampler(2).sample(logits, make_inputs([row])).faults.item() == Fault.NUMERICS


def test_one_allowed_token_is_always_taken():
    rows = [Row(seed=s, temperature=t, allowed=(6,)) for s in range(20) for t in (0.0, 1.0, 50.0)]
    logits = torch.randn(len(rows), 9)
    logits[:, 6] = -80.0
    assert set(Sampler(9).sample(logits, make_inputs(rows)).token_ids.tolist()) == {6}


def test_banned_ids_never_appear():
    rows = [Row(seed=s, temperature=10.0) for s in range(2000)]
    sampler = Sampler(10, banned_token_ids=[0, 1, 2, 3, 9])
    found = sampler.sample(torch.randn(2000, 10), make_inputs(rows)).token_ids
    assert set(found.tolist()) == {4, 5, 6, 7, 8}


def test_hot_and_cold_temperatures():
    logits = torch.randn(1, 12).expand(3000, -1).contiguous()
    hot = Sampler(12).sample(logits, make_inputs([Row(seed=s, temperature=1e6) for s in range(3000)]))
    assert_distribution(hot.token_ids, [1 / 12] * 12)
    cold = Sampler(12).sample(logits, make_inputs([Row(seed=s, temperature=1e-5) for s in range(3000)]))
    assert set(cold.token_ids.tolist()) == {int(logits[0].argmax())}


LAWS = [
    Row(),
    Row(temperature=0.6, top_p=0.9),
    Row(top_k=4),
    Row(min_p=0.15),
    Row(
        temperature=1.5, top_k=9, top_p=0.7, min_p=0.02, bias={3: 1.0}, bans=(0,), repetition=1.5, output=(4,)
    ),
]


@pytest.mark.parametrize("row", LAWS, ids=range(len(LAWS)))
def test_law_of_the_output(row):
    """200,000 draws with one seed over consecutive indices, against the brute-force law."""
    num_draws, vocab_size, chunk = 200_000, 12, 50_000
    logits = torch.randn(vocab_size) * 1.5
    scores = brute_scores(logits.tolist(), row)
    kept = brute_survivors(scores, row)
    logs = log_softmax([s if t in kept else -math.inf for t, s in enumerate(scores)])
    base = make_inputs([row])
    sampler = Sampler(vocab_size)
    drawn = []
    for start in range(0, num_draws, chunk):
        host = {name: torch.from_numpy(array) for name, array in base.host.items()}
        for name, values in host.items():
            if values.shape == (1,) and name != "allowed_offsets" and "_rows" not in name:
                host[name] = values.expand(chunk).contiguous()
        for kind in ("penalty", "bias", "ban"):
            owned = [name for name in host if name.startswith(kind + "_")]
            count = base.host[f"{kind}_rows"].shape[0]
            for name in owned:
                host[name] = torch.from_numpy(base.host[name]).repeat(chunk)
            host[f"{kind}_rows"] = torch.arange(chunk, dtype=torch.int32).repeat_interleave(count)
        host["token_index"] = torch.arange(start, start + chunk)
        host["row_offsets"] = torch.arange(chunk + 1, dtype=torch.int32)
        inputs = type(base).from_host(host)
        drawn.append(sampler.sample(logits.expand(chunk, -1), inputs).token_ids)
    probabilities = [math.exp(v) if v > -9999 else 0.0 for v in logs]
    assert_distribution(torch.cat(drawn), probabilities)


def test_seeds_change_the_output():
    logits = torch.zeros(64, 100)
    sampler = Sampler(100)
    one = sampler.sample(logits, make_inputs([Row(seed=5, index=t) for t in range(64)])).token_ids
    again = sampler.sample(logits, make_inputs([Row(seed=5, index=t) for t in range(64)])).token_ids
    other = sampler.sample(logits, make_inputs([Row(seed=6, index=t) for t in range(64)])).token_ids
    top = sampler.sample(logits, make_inputs([Row(seed=5 | 1 << 63, index=t) for t in range(64)])).token_ids
    assert torch.equal(one, again)
    assert (one == other).sum() < 10 and (one == top).sum() < 10


def test_sampling_leaves_the_logits_alone():
    rows = random_rows(30, 40)
    logits = torch.randn(30, 40)
    before = logits.clone()
    for mode in LogprobsMode:
        Sampler(40, banned_token_ids=[3], logprobs_mode=mode).sample(logits, make_inputs(rows))
        assert_same_bits(logits, before)


@pytest.mark.parametrize(("options", "words"), [
    ({"banned_token_ids": [8]}, "banned token id 8 is outside the vocabulary of 8"),
    ({"banned_token_ids": [-1]}, "banned token id -1"),
    ({"banned_token_ids": range(8)}, "nothing could be sampled"),
    ({"force_top_k": -2}, "force_top_k"),
    ({"logprobs_mode": "cooked"}, "cooked"),
])  # fmt: skip
def test_bad_settings(options, words):
    with pytest.raises(ValueError, match=words):
        Sampler(8, **options)


def test_empty_batch():
    found = Sampler(8).sample(torch.empty(0, 8), make_inputs([]))
    assert found.token_ids.shape == (0,) and found.faults.shape == (0,)
