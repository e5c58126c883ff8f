"""Which estimates decide about drafts, and what the engine learns from their outcome."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from tests.core.harness import core, make_engine, make_params, tokens_of
from tests.core.test_draft_budget import FLAT, STEEP, make_budget, padded, propose

# A draft takes half the time of a plain step: it must survive with a half, with more beside better ones.
HALF = [(1, tokens, 10.0 + 5.0 * (tokens - 1)) for tokens in (1, 9)]


def start(k: int, points, **config):
    """One sequence whose prompt is in flight or done, as `config` says."""
    engine = make_budget(1, k, points, max_model_len=400, num_blocks=60, **config)
    return engine


def lengths(plan) -> list[int]:
    return (plan.seqlens_q - 1).tolist()


# --- fresh, previous, missing -----------------------------------------------------------------------------


def test_coupled_verification_uses_the_newest_confidences():
    engine = start(2, HALF)
    engine.add(make_params(max_tokens=90), tokens_of(3))
    for confidences, expected in (([0.9, 0.9], 2), ([0.9, 0.2], 1), ([0.3, 1.0], 0), ([0.9, 0.9], 2)):
        propose(engine, engine.schedule(), [confidences])
        plan = engine.schedule()
        assert lengths(plan) == [expected]
        propose(engine, plan, [[1.0, 1.0]])


def test_ratio_verification_uses_the_block_before():
    engine = start(3, HALF)
    engine.add(make_params(max_tokens=90, is_ratio=True), tokens_of(3))
    propose(engine, engine.schedule(), [[0.1] * 3])
    plan = engine.schedule()
    assert lengths(plan) == [3], "nothing is known of it: its drafts count as certain"
    propose(engine, plan, [[0.95] * 3])
    plan = engine.schedule()
    assert lengths(plan) == [0], "the first block said 0.1"
    propose(engine, plan, [[0.3] * 3])
    plan = engine.schedule()
    assert lengths(plan) == [3], "the second said 0.95, though the drafts at hand say 0.3"


def test_of_the_block_before_only_the_causal_part_decides():
    """A confidence reads the drafts before its own; those behind the emitted ones may be drawn once more."""
    engine = start(4, HALF)
    seq_id = engine.add(make_params(max_tokens=90, is_ratio=True), tokens_of(3))
    propose(engine, engine.schedule(), [[0.9, 0.9, 0.9, 0.1]])
    plan = engine.schedule()
    propose(engine, plan, [[0.9, 0.9, 0.1, 0.1]])  # one token emitted: of the first block 0.9, 0.9 remain
    plan = engine.schedule()
    assert lengths(plan) == [4], "positions without an estimate count by their acceptance, unknown yet"
    engine.commit(
        plan,
        np.full(5, 9, np.int32),  # the first two drafts stand
        num_emitted=np.array([3], np.int32),
        drafts=np.full((1, 4), 9, np.int32),
        confidences=np.full((1, 4), 0.9, np.float32),
    )
    assert lengths(engine.schedule()) == [2], "0.9, 0.9, 0.1, 0.1"
    assert engine.num_output_tokens(seq_id) == 5


def test_new_sequences_count_by_the_acceptance_of_others(seed):
    """Certain while nothing is known, then the share of drafts that stood at each position."""
    for acceptance, expected in ((0.9, 2), (0.2, 0)):
        drafter = Drafter([acceptance] * 2, FLAT, seed)
        engine = drafter.engine
        for is_known in (False, True):
            if is_known:
                drafter.run(400, lambda rng: [0.5] * 2)
            engine.set_step_times(HALF)
            seq_id = engine.add(core.SequenceParams(is_ratio=True), tokens_of(3))
            propose(engine, engine.schedule(), [[0.5] * 2])
            assert lengths(engine.schedule()) == [expected if is_known else 2]
            engine.discard_in_flight()
            engine.abort(seq_id)
            engine.set_step_times(FLAT)


def test_greedy_requests_are_coupled_whatever_they_ask():
    engine = start(2, HALF)
    engine.add(make_params(max_tokens=90, is_ratio=True, inv_temperature=0.0), tokens_of(3))
    propose(engine, engine.schedule(), [[0.1, 1.0]])
    assert lengths(engine.schedule()) == [0]


@pytest.mark.parametrize("is_ratio", [False, True])
def test_recomputed_sequences_begin_without_estimates(is_ratio):
    """They propose the drafts at hand once more; what was known of them must not decide."""
    engine = start(2, HALF)
    seq_id = engine.add(make_params(max_tokens=90, is_ratio=is_ratio), tokens_of(3))
    propose(engine, engine.schedule(), [[0.1, 0.1]])
    propose(engine, engine.schedule(), [[0.1, 0.1]])
    engine.preempt(seq_id)
    propose(engine, engine.schedule(), [[0.8, 0.8]])
    assert lengths(engine.schedule()) == [2]


def test_in_flight_the_block_before_decides_about_the_total():
    """The host is one block behind: certain at first, then what the committed step said."""
    engine = start(4, HALF, async_scheduling=True)
    engine.add(make_params(max_tokens=90), tokens_of(3))
    prefill = engine.schedule()
    first = engine.schedule()
    assert lengths(first) == [4]
    propose(engine, prefill, [[0.9, 0.8, 0.5, 1.0]])  # survivals 0.9, 0.72, 0.36
    second = engine.schedule()
    assert lengths(second) == [2] and second.max_seqlens_q.tolist() == [5]
    propose(engine, first, [[0.2, 0.2, 0.2, 0.2]])


def test_in_flight_ratio_verification_knows_less_of_the_block_before():
    engine = start(4, HALF, async_scheduling=True)
    engine.add(make_params(max_tokens=90, is_ratio=True), tokens_of(3))
    prefill = engine.schedule()
    engine.schedule()
    propose(engine, prefill, [[0.95, 0.8, 0.0, 0.0]])
    assert lengths(engine.schedule()) == [4], "the third confidence read the second draft"


# --- the causality example --------------------------------------------------------------------------------


TARGET, DRAFT = (0.7, 0.3), (0.5, 0.5)


def share_of_first_token(is_ratio: bool, seed: int, num_blocks: int = 12_000) -> float:
    """Tokens A and B, target (.7, .3), draft (.5, .5), ratio test; A makes the second draft look good.

    The curve gives 1, .5 and .45 steps per time for 1, 2 and 3 tokens. Engines are too short to learn.
    """
    rng = np.random.default_rng(seed)
    drawn = [0, 0]
    while sum(drawn) < num_blocks:
        engine = start(2, padded({1: 1.0, 2: 2.0, 3: 1 / 0.45}))
        engine.add(make_params(max_tokens=390, is_ratio=is_ratio), tokens_of(1))
        fresh, emitted = None, [3]
        for _ in range(60):
            plan = engine.schedule()
            if fresh is not None:
                emitted = ratio_test(fresh[: plan.num_samples - 1], rng)
                drawn[emitted[0]] += 1
            fresh = (rng.random(2) >= DRAFT[0]).astype(np.int32)
            engine.commit(
                plan,
                np.array((emitted + [0, 0])[: plan.num_samples], np.int32),
                num_emitted=np.array([len(emitted)], np.int32),
                drafts=fresh[None],
                confidences=np.array([[0.8, 0.9 if fresh[0] == 0 else 0.0]], np.float32),
            )
    return drawn[0] / sum(drawn)


def ratio_test(drafts, rng) -> list[int]:
    """Tokens that verification of some drafts emits."""
    emitted = []
    for token in drafts.tolist():
        if rng.random() >= TARGET[token] / DRAFT[token]:
            return [*emitted, 0]  # the residual of (.7, .3) over (.5, .5) is A alone
        emitted.append(token)
    return [*emitted, int(rng.random() >= TARGET[0])]


def test_ratio_verification_keeps_the_law(seed):
    """A scan over fresh confidences verifies only drafts that turned out to be A: .85 instead of .70."""
    assert share_of_first_token(True, seed) == pytest.approx(0.70, abs=0.02)  # 4.7 standard errors
    assert share_of_first_token(False, seed) == pytest.approx(0.85, abs=0.02), "the leak that is avoided"


# --- calibration ------------------------------------------------------------------------------------------


def logit(p: float) -> float:
    return math.log(p / (1 - p))


class Drafter:
    """One engine whose drafts stand with given probabilities, whatever their confidences say."""

    def __init__(self, truth: list[float], points, seed: int, is_ratio: bool = False) -> None:
        self.k, self.truth, self.is_ratio = len(truth), truth, is_ratio
        self.rng = random.Random(seed)
        self.engine = make_budget(
            1, self.k, points, max_model_len=2000, num_blocks=260, max_num_batched_tokens=2048
        )
        self.blocks: list[tuple[list[float], int]] = []  # confidences and accepted drafts of each block
        self.total = [0, 0]

    def run(self, num_steps: int, confidences_of) -> None:
        """`confidences_of(rng)` gives the confidences of each block."""
        engine, rng = self.engine, self.rng
        steps = 0
        while steps < num_steps:
            seq_id = engine.add(core.SequenceParams(is_ratio=self.is_ratio), tokens_of(1))
            # the target's tokens are all 5; the first wrong draft of a block is a 6
            truth_of_block: list[int] = []
            while engine.status(seq_id) != core.SequenceStatus.FINISHED and steps < num_steps:
                plan = engine.schedule()
                stands = next((j for j, hit in enumerate(truth_of_block) if not hit), len(truth_of_block))
                count = min(stands, plan.num_samples - 1) + 1
                if truth_of_block and engine.drafts(seq_id).size:
                    self.blocks.append((engine.confidences(seq_id).tolist(), stands))
                truth_of_block = [rng.random() < p for p in self.truth]
                result = engine.commit(
                    plan,
                    np.full(plan.num_samples, 5, np.int32),
                    num_emitted=np.array([count], np.int32),
                    drafts=np.array([[5 if hit else 6 for hit in truth_of_block]], np.int32),
                    confidences=np.array([confidences_of(rng)], np.float32),
                )
                self.total[0] += result.num_verified
                self.total[1] += result.num_accepted
                steps += 1
            engine.abort(seq_id)
            engine.release(seq_id)


@pytest.mark.parametrize("is_ratio", [False, True])
@pytest.mark.parametrize(("given", "truth"), [(0.95, 0.6), (0.3, 0.8), (0.7, 0.7), (0.999, 0.2)])
def test_a_miscalibrated_head_converges(seed, given, truth, is_ratio):
    drafter = Drafter([truth] * 3, [], seed, is_ratio)
    drafter.run(50, lambda rng: [given] * 3)
    assert drafter.engine.confidence_odds().tolist() == [1.0] * 3, "too few outcomes"
    drafter.run(8000, lambda rng: [given] * 3)
    learnt = drafter.engine.num_draft_outcomes()
    assert learnt[0] > learnt[1] > learnt[2] > 300 or truth == 0.2
    for odds in drafter.engine.confidence_odds()[: 3 if truth > 0.2 else 1]:
        corrected = logit(given) + math.log(odds)
        assert 1 / (1 + math.exp(-corrected)) == pytest.approx(truth, abs=0.06), f"{odds=}"


def test_the_correction_meets_the_mean_of_varying_confidences(seed):
    """An overconfident head: true logit x, reported 1.8 x + 1. Corrected, its mean is the acceptance."""
    rng = random.Random(seed)
    engine = make_budget(1, 1, [], max_model_len=2000, num_blocks=260, max_num_batched_tokens=2048)
    seq_id, drafts, recent = None, None, []
    for step in range(8000):
        if seq_id is None or engine.status(seq_id) == core.SequenceStatus.FINISHED:
            seq_id, drafts = engine.add(core.SequenceParams(), tokens_of(1)), None
        plan = engine.schedule()
        x = rng.gauss(0.5, 1.0)
        stands = rng.random() < 1 / (1 + math.exp(-x))
        reported = 1 / (1 + math.exp(-(1.8 * x + 1)))
        if step > 4000:
            recent.append((reported, stands))
        engine.commit(
            plan,
            np.full(plan.num_samples, 5, np.int32),
            num_emitted=np.array([1 + (drafts == 5 and plan.num_samples > 1)], np.int32),
            drafts=np.array([[5 if stands else 6]], np.int32),
            confidences=np.array([[reported]], np.float32),
        )
        drafts = 5 if stands else 6
    odds = float(engine.confidence_odds()[0])
    corrected = np.mean([odds * c / (1 - c + odds * c) for c, _ in recent])
    assert corrected == pytest.approx(np.mean([hit for _, hit in recent]), abs=0.03)
    assert np.mean([c for c, _ in recent]) - corrected > 0.08, "the raw head is overconfident"


def test_drafts_that_nobody_verifies_are_learnt_from(seed):
    """Coupled drafts are compared with the tokens that come later, so an all too modest head recovers."""
    drafter = Drafter([0.9, 0.8], [(1, n, 10.0 + 6.0 * (n - 1)) for n in (1, 3)], seed)
    drafter.run(60, lambda rng: [0.2, 0.2])
    assert drafter.total == [0, 0], "0.2 is not worth the time"
    drafter.run(3000, lambda rng: [0.2, 0.2])
    odds = drafter.engine.confidence_odds()
    assert 1 / (1 + math.exp(-(logit(0.2) + math.log(odds[0])))) == pytest.approx(0.9, abs=0.06)
    assert drafter.total[0] > 1000 and drafter.total[1] / drafter.total[0] > 0.8
    outcomes = drafter.engine.num_draft_outcomes()
    assert outcomes[1] > 500, "also of the second position"


def test_ratio_drafts_that_nobody_verifies_say_nothing(seed):
    drafter = Drafter([0.9], STEEP, seed, is_ratio=True)
    drafter.run(200, lambda rng: [0.2])
    assert drafter.engine.num_draft_outcomes()[0] <= 1, "only the first block counts as certain"


def test_ends_that_the_drafter_expects_are_no_estimates(seed):
    drafter = Drafter([0.9, 0.9, 0.9], [], seed)
    drafter.run(300, lambda rng: [0.9, 0.0, 0.9])
    assert drafter.engine.num_draft_outcomes().tolist()[1:] == [0, 0]
    count = drafter.engine.reliability()[0]
    assert count[0].sum() > 100 and count[1:].sum() == 0


def test_corrected_survivals_decide(seed):
    """The same confidences, before and after experience: 0.9 that holds half of the time is not verified."""
    drafter = Drafter([0.4], HALF, seed)
    drafter.run(40, lambda rng: [0.9])
    assert drafter.total[0] > 30
    drafter.run(400, lambda rng: [0.9])
    before = drafter.total[0]
    drafter.run(100, lambda rng: [0.9])
    assert drafter.total[0] - before < 5


# --- reliability and statistics ---------------------------------------------------------------------------


def test_reliability_table(seed):
    drafter = Drafter([0.8, 0.6, 0.7], [], seed)
    drafter.run(3000, lambda rng: [rng.uniform(0.02, 1.0) for _ in range(3)])
    count, total, accepted = drafter.engine.reliability()
    assert count.shape == total.shape == accepted.shape == (3, 20)
    expected = np.zeros((3, 3, 20))
    for confidences, stands in drafter.blocks:
        for j, survival in enumerate(np.cumprod(np.array(confidences, np.float64))):
            place = min(int(survival * 20), 19)
            expected[:, j, place] += (1, survival, j < stands)
    # sequences that end inside a block leave some of its positions unknown
    missing = expected[0].sum(1) - count.sum(1)
    assert (missing >= 0).all() and missing.max() <= 12
    assert np.abs(expected[0] - count).sum() <= 40
    assert np.abs(expected[1] - total).sum() <= 40 and np.abs(expected[2] - accepted).sum() <= 40
    assert (accepted.sum(1) / count.sum(1)).tolist() == pytest.approx([0.8, 0.48, 0.336], abs=0.04)
    drafter.engine.reset_reliability()
    assert drafter.engine.reliability()[0].sum() == 0


def test_reliability_does_not_depend_on_what_was_verified():
    """The same drafter under a steep and a flat curve: blocks, outcomes and table are equal."""

    def run(points):
        engine = make_budget(1, 2, points, max_model_len=2000, num_blocks=260, max_num_batched_tokens=2048)
        seq_id = engine.add(core.SequenceParams(max_tokens=900), tokens_of(1))
        while engine.status(seq_id) != core.SequenceStatus.FINISHED:
            plan = engine.schedule()
            index = engine.num_output_tokens(seq_id)
            target = [(index + j) * (index + j) % 7 for j in range(plan.num_samples + 3)]
            drafts = engine.drafts(seq_id).tolist()[: plan.num_samples - 1]
            count = next((j for j, d in enumerate(drafts) if d != target[j]), len(drafts)) + 1
            after = index + count
            guesses = [(after + j) ** 2 % 7 if (after + j) % 3 else 60 for j in range(2)]
            engine.commit(
                plan,
                np.array(target[: plan.num_samples], np.int32),
                num_emitted=np.array([count], np.int32),
                drafts=np.array([guesses], np.int32),
                confidences=np.array([[0.5 + (after % 5) / 10, 0.7]], np.float32),
            )
        return engine

    steep, flat = run(STEEP), run(FLAT)
    for a, b in zip(steep.reliability(), flat.reliability()):
        assert a.tolist() == b.tolist()
    assert steep.num_draft_outcomes().tolist() == flat.num_draft_outcomes().tolist()
    assert steep.confidence_odds().tolist() == flat.confidence_odds().tolist()


@pytest.mark.parametrize("num_left", range(1, 6))
@pytest.mark.parametrize("stands", [False, True])
def test_blocks_at_the_end_of_a_sequence(num_left, stands):
    """Whether it stands or is refused, a block counts for as many drafts as tokens can still come."""
    k = 4
    engine = start(k, None)
    engine.add(make_params(max_tokens=1 + num_left, ignore_eos=True), tokens_of(3))
    drafts, confidences = np.arange(20, 20 + k, dtype=np.int32)[None], np.full((1, k), 0.5, np.float32)
    engine.commit(engine.schedule(), np.array([7], np.int32), drafts=drafts, confidences=confidences)
    plan = engine.schedule()
    assert plan.num_rows == min(num_left, k + 1)
    tokens = np.append(drafts, 7)[: plan.num_rows] if stands else np.full(plan.num_rows, 7)
    num_emitted = np.array([plan.num_rows if stands else 1], np.int32)
    engine.commit(plan, tokens.astype(np.int32), num_emitted, drafts=drafts + 40, confidences=confidences)
    length = min(k, num_left)
    count, _, accepted = engine.reliability()
    assert count.sum(axis=1).tolist() == [1] * length + [0] * (k - length)
    assert accepted.sum() == (length if stands else 0)


def test_counts_by_position():
    engine = make_engine(num_draft_tokens=3)
    a, b = (engine.add(make_params(max_tokens=30), tokens_of(4)) for _ in range(2))
    plan = engine.schedule()
    result = engine.commit(plan, np.full(2, 7, np.int32), drafts=np.array([[7, 7, 8], [8, -1, -1]], np.int32))
    assert (result.num_drafted, result.num_verified, result.num_accepted) == (4, 0, 0)
    plan = engine.schedule()
    result = engine.commit(plan, np.full(plan.num_samples, 7, np.int32), drafts=np.full((2, 3), 7, np.int32))
    assert (result.num_drafted, result.num_verified, result.num_accepted) == (6, 4, 2)
    assert result.verified_by_position.tolist() == [2, 1, 1]
    assert result.accepted_by_position.tolist() == [1, 1, 0]
    for seq_id, verified, accepted, drafted in ((a, [1, 1, 1], [1, 1, 0], 6), (b, [1, 0, 0], [0, 0, 0], 4)):
        metrics = engine.metrics(seq_id)
        assert metrics.verified_by_position.tolist() == verified
        assert metrics.accepted_by_position.tolist() == accepted
        assert (metrics.num_drafted, metrics.num_verified) == (drafted, sum(verified))
        assert metrics.num_accepted == sum(accepted)
