"""Verify lengths chosen by confidence change nothing but the time: equal results on every step-time curve."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import pytest

from deepinfer.runtime.model_runner import ModelRunner
from deepinfer.runtime.pending_context import PendingContext
from deepinfer.sampling_params import SamplingParams
from deepinfer.settings import Settings
from tests.engine.matrix import bundled_prompts
from tests.support.curves import CURVES, BelievingCore, believed
from tests.support.engines import PLAIN_STEPS, facts, generate, greedy, make_llm, watched


@contextlib.contextmanager
def make(curve: str, **changes: Any) -> Iterator[Any]:
    """An engine that believes in a curve."""
    settings = Settings(**{"use_draft_budget": True, **changes.pop("settings", {})})
    with (
        believed(curve),
        make_llm(settings=settings, **{"max_num_seqs": 8, "max_model_len": 512, **changes}) as llm,
    ):
        yield llm


class DealtCore(BelievingCore):
    """Counts rows that the device gave to other sequences than planned."""

    def __init__(self, core: Any) -> None:
        super().__init__(core)
        self.num_dealt = 0

    def set_seqlens_q(self, plan: Any, seqlens_q: Any) -> None:
        self.num_dealt += int(abs(plan.seqlens_q - seqlens_q).sum()) // 2
        self._core.set_seqlens_q(plan, seqlens_q)


class PreemptingCore(DealtCore):
    """Preempts a sequence of the newest step before every sixth plan."""

    def before_plan(self) -> None:
        if len(self.plans) % 6 == 5:
            with contextlib.suppress(KeyError):  # it may have ended
                self._core.preempt(random.choice(self.plans[-1].seq_ids.tolist()))


@pytest.fixture(scope="module")
def workload() -> tuple[list[list[int]], list[SamplingParams]]:
    """Questions, stories, prose and code in three styles; more requests than run at once."""
    styles = [{"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.9}]
    prompts = [list(tokens) for tokens in bundled_prompts()[::4]]
    params = [
        SamplingParams(max_tokens=24 + 3 * (i % 5), seed=i, logprobs=1, **styles[i % 3])
        for i in range(len(prompts))
    ]
    return prompts, params


@pytest.fixture(scope="module")
def expected(workload) -> list[Any]:
    with make_llm(settings=PLAIN_STEPS, max_num_seqs=1, max_model_len=512) as llm:
        return facts(generate(llm, *workload))


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("curve", CURVES)
def test_results_do_not_depend_on_verify_lengths(workload, expected, curve, is_async):
    with make(curve, settings={"use_async_scheduling": is_async}) as llm:
        with watched(llm, DealtCore) as core:
            found = facts(generate(llm, *workload))
            stats, counts = core.draft_budget_stats(), llm.llm_engine.stats
            plans = [plan for plan in core.plans if not plan.is_prefill]
        assert found == expected
        assert stats.num_steps == len(plans) > 20
        assert sum(plan.num_matched for plan in plans) > 0 or not is_async
        if curve == "flat":
            assert stats.num_full > 20 and stats.num_none == 0
            assert counts.accepted_by_position[0] < counts.verified_by_position[0]
        elif curve == "modest":
            assert stats.num_cut > 10 and counts.verified_by_position[0] > counts.verified_by_position[4] > 0
            assert core.num_dealt > 5 or not is_async
        elif curve == "steep":
            assert stats.num_none > 15 and stats.num_undrafted < stats.num_steps / 3
        else:
            assert stats.num_undrafted > 20 and counts.verified_by_position.sum() < 40


def test_a_single_request_verifies_all_or_nothing(workload):
    for curve, is_verified in (("flat", True), ("steep", False)):
        with make(curve, max_num_seqs=1) as llm:
            (output,) = generate(llm, [workload[0][0]], greedy(40))
            metrics = output.metrics
            assert metrics.num_draft_tokens > 40
            if is_verified:
                assert metrics.num_verified_tokens >= metrics.num_draft_tokens - 10
            else:  # but for the first block, of which nothing is known when it is planned
                assert metrics.num_verified_tokens <= 5


def test_preempted_sequences(workload, expected):
    with make("modest") as llm, watched(llm, PreemptingCore) as core:
        found = facts(generate(llm, *workload))
        assert core.num_preemptions > 5 and core.num_dealt > 5 and core.draft_budget_stats().num_cut > 10
    assert found == expected


def test_ratio_requests_beside_coupled_ones(workload, expected):
    """The verify lengths of some may change their tokens, never those of the others."""
    prompts, params = workload
    ratio = {"temperature": 1.0, "max_tokens": 30, "verification": "ratio"}
    pairs = [(each, SamplingParams(seed=i, **ratio)) for i, each in enumerate(params)]
    with make("modest") as llm:
        twice = [prompt for prompt in prompts for _ in range(2)]
        both = generate(llm, twice, [each for pair in pairs for each in pair])
        assert facts(both[::2]) == expected
        verified = [output.metrics.num_verified_tokens for output in both[1::2]]
        assert sum(verified) > 10 and all(len(output.outputs[0].token_ids) <= 30 for output in both[1::2])


def test_real_step_times_correct_the_curve(workload):
    """Steps take what they take: the engine believes more of them than a curve of nothing said."""
    with make("flat") as llm:
        core = llm.llm_engine.core
        core.set_step_times([(1, 1, 1e-3), (8, 48, 2e-3)], [(1, 1e-3)])
        generate(llm, [workload[0][0]], greedy(40))
        assert core.step_ms(1, 6) > 0.1


def test_drafts_do_not_depend_on_when_context_is_taken_in(monkeypatch):
    """Where drafting pauses, context waits; a probe then proposes what it would have proposed anyway."""
    prompts = [list(tokens) for tokens in bundled_prompts()[::7]]
    params = [SamplingParams(temperature=0, max_tokens=75 + 25 * (i % 3), ignore_eos=True) for i in range(8)]
    put_off, sample = PendingContext.put_off, ModelRunner.sample
    waiting: list[int] = []
    drafts: list[Any] = []

    def recorded(runner: ModelRunner, *args: Any) -> Any:
        result = sample(runner, *args)
        drafts.append(None if result.drafts is None else result.drafts.tolist())
        return result

    def run() -> tuple[Any, list[Any]]:
        drafts.clear()
        with make("without drafting", max_num_seqs=6, settings={"use_async_scheduling": False}) as llm:
            drafts.clear()
            with watched(llm, BelievingCore):
                found = facts(generate(llm, prompts, params))
        return found, list(drafts)

    def counted(pending: PendingContext, context: Any) -> None:
        waiting.append(context.positions.shape[0])
        put_off(pending, context)

    monkeypatch.setattr(ModelRunner, "sample", recorded)
    monkeypatch.setattr(PendingContext, "put_off", counted)
    late = run()
    assert len(waiting) > 100, "context waited"
    assert max(waiting) > 6, "of prompts, too"
    monkeypatch.setattr(PendingContext, "put_off", PendingContext.take_in)
    assert run() == late
    proposed = [step for step in late[1] if step is not None]
    assert len(proposed) > 5 and None in late[1]
    assert any([-1] * 5 in step and step[-1] != [-1] * 5 for step in proposed), "a probe of some"


def test_statistics(workload):
    """Totals are the sums over requests, and the reliability table holds every block of coupled requests."""
    with make("modest") as llm:
        outputs = generate(llm, *workload)
        engine = llm.llm_engine
        stats, metrics = engine.stats, [output.metrics for output in outputs]
        assert stats.num_drafted == sum(m.num_draft_tokens for m in metrics) > 0
        assert stats.verified_by_position.sum() == sum(m.num_verified_tokens for m in metrics) > 0
        assert stats.accepted_by_position.sum() == sum(m.num_accepted_tokens for m in metrics) > 0
        tables = engine.draft_reliability()
        assert len(tables) == 5 and all(len(bins) == 20 for bins in tables)
        counts = [sum(each.count for each in bins) for bins in tables]
        assert counts == sorted(counts, reverse=True) and counts[4] > 50
        for bins in tables:
            for each in bins:
                assert each.count == 0 or each.low - 1e-9 <= each.mean_score <= each.high + 1e-9
                assert 0 <= each.mean_label <= 1
        estimate = sum(each.count * each.mean_score for each in tables[0]) / counts[0]
        acceptance = sum(each.count * each.mean_label for each in tables[0]) / counts[0]
        assert estimate == pytest.approx(acceptance, abs=0.25), "the head is no noise"
