"""A preempted request that waits in host memory ends like one that never was, without another prefill."""

from __future__ import annotations

import dataclasses
import functools
import random
import time
from collections.abc import Iterator
from typing import Any

import pytest

from deepinfer.engine.swap import HostSwap
from deepinfer.runtime.sequence_bytes import SequenceBytes
from deepinfer.sampling_params import SamplingParams
from deepinfer.settings import Settings
from tests.engine.equalities import Case, Outcome, differences, run_alone, run_together
from tests.support.curves import believed
from tests.support.engines import (
    PLAIN_STEPS,
    WatchedCore,
    assert_idle,
    facts,
    generate,
    greedy,
    make_cold_llm,
    make_llm,
    prompt_of,
    watched,
)

# Around blocks, around a window, and around the groups of a ratio.
LENGTHS = (2, 113, 126, 127, 128, 129, 130, 243, 255, 257)
STYLES = ("greedy", "random", "nucleus")
CASES = tuple(Case(length, STYLES[place % 3], num_outputs=12) for place, length in enumerate(LENGTHS))
SETTINGS = {
    "plain": PLAIN_STEPS,
    "async": Settings(num_draft_tokens=0),
    "drafts": Settings(use_async_scheduling=False),
    "drafts, async": Settings(),
    "varlen, async": Settings(use_draft_budget=True),
}


@pytest.fixture(scope="module", autouse=True)
def step_times() -> Iterator[None]:
    """Engines with a draft budget do not measure the machine, which takes seconds."""
    with believed("modest"):
        yield


@functools.cache
def expected() -> Outcome:
    with make_cold_llm(settings=PLAIN_STEPS) as llm:
        return run_alone(llm, CASES)


class Preempting(WatchedCore):
    """Preempts decoding sequences at random, before any step.

    Attributes:
        num_preempted: how often.
    """

    def __init__(self, core: Any, seed: int, rate: float) -> None:
        super().__init__(core)
        self._order = random.Random(seed)
        self._rate = rate
        self.num_preempted = 0

    def before_plan(self) -> None:
        if not self.plans or self.plans[-1].is_prefill or self._order.random() > self._rate:
            return
        try:
            self.num_preempted += self.preempt(self._order.choice(self.plans[-1].seq_ids.tolist()))
        except KeyError:  # it has ended
            return


def check_swap(llm: Any) -> None:
    """What went out has come back or ended, and nothing is left on the host."""
    assert_idle(llm)
    engine = llm.llm_engine
    held = engine.core.swap_stats()
    assert (held.num_held, held.held_bytes, engine._swap.num_held) == (0, 0, 0)


@pytest.mark.parametrize(
    ("name", "caching"),
    [*((name, False) for name in SETTINGS), ("plain", True), ("drafts, async", True)],
)
def test_swapped_at_random_points(name, caching, seed):
    options = {"enable_prefix_caching": caching, "preemption_mode": "swap", "max_num_seqs": 16}
    with make_llm(settings=SETTINGS[name], **options) as llm, watched(llm, Preempting, seed, 0.7) as core:
        assert not differences(CASES, run_together(llm, CASES), expected())
        stats = llm.get_stats()
        assert core.num_preempted >= 5
        assert stats.num_swapped_out == stats.num_swapped_in > 2
        slot = llm.llm_engine.model_runner._caches.layout.slot_bytes
        assert stats.swapped_out_bytes == stats.swapped_in_bytes > slot * stats.num_swapped_in
        assert stats.num_recomputed_rows == 0
        assert stats.num_prefill_tokens == sum(LENGTHS) - stats.num_cached_tokens
        check_swap(llm)


@pytest.mark.parametrize("settings", [Settings(), Settings(replay_mode="compact", replay_keep_tokens=140)])
def test_swapped_for_lack_of_blocks(settings):
    """Bounded replay has cut windows, which are swapped as they are."""
    lengths = (80, 88, 92, 95, 208, 216, 220, 223)
    prompts = [prompt_of(length) for length in lengths]
    params = [
        SamplingParams(
            temperature=place % 3 / 2,
            seed=place,
            max_tokens=48,
            ignore_eos=True,
            logprobs=1,
        )
        for place in range(len(lengths))
    ]
    plain = dataclasses.replace(settings, num_draft_tokens=0, use_async_scheduling=False)
    with make_cold_llm(settings=plain) as llm:
        want = facts(generate(llm, prompts, params))
    limits = {"max_num_seqs": 8, "max_model_len": 320, "num_blocks": 15, "preemption_mode": "swap"}
    with make_llm(settings=settings, **limits) as llm:
        outputs = generate(llm, prompts, params)
        stats = llm.get_stats()
        assert stats.num_preemptions >= stats.num_swapped_out > 0
        assert stats.num_swapped_in == stats.num_swapped_out and stats.num_recomputed_rows == 0
        check_swap(llm)
    assert facts(outputs) == want


@pytest.mark.parametrize("use_async", [False, True])
def test_ratio_requests_keep_the_scores_of_their_drafts(use_async, seed):
    """Recomputed, they would get new drafts, and with them other tokens of the same law."""
    prompts = [prompt_of(length) for length in (60, 127, 128, 200)]
    params = [
        SamplingParams(temperature=1.0, seed=place, max_tokens=36, ignore_eos=True, verification="ratio")
        for place in range(len(prompts))
    ]
    options = {"settings": Settings(use_async_scheduling=use_async), "preemption_mode": "swap"}
    with make_cold_llm(**options) as llm:
        want = generate(llm, prompts, params)
        assert llm.get_stats().num_accepted > 0
        with watched(llm, Preempting, seed, 0.7):
            outputs = generate(llm, prompts, params)
        for one, other in zip(outputs, want, strict=True):
            # At the end fewer drafts are verified of a sequence in flight, whose length is not known.
            assert one.outputs[0].token_ids[:23] == other.outputs[0].token_ids[:23]
        stats, layout = llm.get_stats(), llm.llm_engine.model_runner._caches.layout
        most = stats.num_swapped_in * (layout.slot_bytes + 2 * layout.block_bytes)
        assert stats.num_swapped_in > 3 and stats.swapped_in_bytes > most, "scores are part of them"
        check_swap(llm)


def test_a_full_pool_is_no_trouble(seed):
    """Room for one sequence: the others are recomputed."""
    with make_cold_llm() as llm:
        layout = llm.llm_engine.model_runner._caches.layout
        one = (layout.slot_bytes + 3 * layout.block_bytes) / (1 << 30)
    options = {"preemption_mode": "swap", "swap_space": one, "max_num_seqs": 8}
    with make_cold_llm(**options) as llm, watched(llm, Preempting, seed, 0.7):
        assert llm.llm_engine.memory_plan["swap space"].num_bytes == int(one * (1 << 30))
        # Two of a step, so that the second finds the pool full.
        real, core = llm.llm_engine.core.before_plan, llm.llm_engine.core
        core.before_plan = lambda: (real(), real())
        assert not differences(CASES, run_together(llm, CASES), expected())
        stats = llm.get_stats()
        assert stats.num_swapped_in > 0 and core.swap_stats().num_refused > 0
        assert stats.num_recomputed_rows > 0
        check_swap(llm)


def test_modes():
    """`auto` swaps long contexts when copies are fast, and recomputes when they are slow."""
    prompt, params = [list(prompt_of(300))], SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    with make_cold_llm() as llm:
        want = facts(generate(llm, prompt, params))
    for mode, rate, swaps in (
        ("recompute", 1e15, False),
        ("swap", 1.0, True),
        ("auto", 1e15, True),
        ("auto", 1.0, False),
    ):
        with make_cold_llm(preemption_mode=mode, settings=PLAIN_STEPS) as llm:
            engine = llm.llm_engine
            engine.core.set_copy_rate(rate)
            engine.add_request("a", prompt[0], params)
            for _ in range(4):
                engine.step()
            assert engine.core.preempt(1)
            outputs = []
            while engine.has_unfinished_requests():
                outputs += engine.step()
            assert facts(outputs) == want
            stats = llm.get_stats()
            assert (stats.num_swapped_in == 1) == swaps and (stats.num_recomputed_rows > 300) != swaps
            assert "swapped out" in str(stats)


@pytest.mark.parametrize("use_async", [False, True])
def test_aborted_while_swapped(use_async):
    """The bytes go at the next step; a request that is dropped leaves nothing either."""
    settings = Settings(use_async_scheduling=use_async)
    with make_cold_llm(settings=settings, preemption_mode="swap") as llm:
        engine = llm.llm_engine
        params = SamplingParams(max_tokens=20, ignore_eos=True)
        for name in ("a", "b", "c"):
            engine.add_request(name, list(prompt_of(150, ord(name))), params)
        for _ in range(3):
            engine.step()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(HostSwap, "copy_in", lambda self: None)
            for seq_id in (1, 2):
                engine.core.preempt(seq_id)
            for _ in range(3):
                engine.step()
            assert engine._swap.num_held == engine.core.swap_stats().num_held == 2
        engine.abort_request("a")
        engine.drop_request(["b"])
        outputs = []
        while engine.has_unfinished_requests():
            outputs += engine.step()
        assert sorted(output.request_id for output in outputs) == ["a", "c"]
        engine.settle()
        check_swap(llm)


@pytest.mark.parametrize(
    ("where", "use_async"),
    [("_read", True), ("_write", True), ("_write", False), ("copy_in", True), ("copy_out", False)],
)
def test_interrupted_copies(where, use_async, monkeypatch, seed):
    """Whatever fails: what was not copied to its end is recomputed, and tokens stay what they are."""
    real, calls = getattr(HostSwap, where), iter(range(10**9))

    def failing(self: HostSwap, *args: Any) -> Any:
        if next(calls) % 3 == 2:
            raise InterruptedError(where)
        return real(self, *args)

    settings = Settings(use_async_scheduling=use_async, num_draft_tokens=0)
    options = {"preemption_mode": "swap"}
    with make_cold_llm(settings=settings, **options) as llm, watched(llm, Preempting, seed, 0.8):
        engine, want = llm.llm_engine, [tokens for tokens, _ in expected()]
        monkeypatch.setattr(HostSwap, where, failing)
        for place, case in enumerate(CASES):
            engine.add_request(str(place), list(case.prompt), case.params)
        outputs, num_failed = {}, 0
        while engine.has_unfinished_requests():
            try:
                outputs |= {output.request_id: output for output in engine.step()}
            except InterruptedError:
                num_failed += 1
            engine.core.check_integrity()
        assert num_failed > 0
        tokens = [outputs[str(place)].outputs[0].token_ids for place in range(len(CASES))]
        assert tokens == want
        engine.settle()
        check_swap(llm)


class Prompts(WatchedCore):
    """A prompt goes before whatever decodes."""

    def __init__(self, core: Any, prefill: Any) -> None:
        super().__init__(core)
        self._prefill = prefill

    def schedule(self, *args: Any) -> Any:
        plan = self._core.schedule(self._prefill) or self._core.schedule()
        self.plans += [] if plan is None else [plan]
        return plan


@pytest.mark.parametrize("use_async", [True, False])
def test_a_failed_copy_of_who_is_not_in_the_next_plan(use_async, monkeypatch):
    """The steps behind the copy run a prompt, and fail all the same: nobody goes on without his bytes."""
    settings = Settings(use_async_scheduling=use_async, num_draft_tokens=0)
    prompts, params = [list(prompt_of(length)) for length in (150, 400)], greedy(12, logprobs=1)
    write, num_writes = SequenceBytes.write, []

    def failing(self: SequenceBytes, *args: Any) -> None:
        time.sleep(0.1)  # the step in front of it is committed before it fails
        num_writes.append(len(num_writes))
        raise InterruptedError("write")

    limits = {"preemption_mode": "swap", "max_num_batched_tokens": 128, "max_num_seqs": 4}
    with make_cold_llm(settings=settings, **limits) as llm:
        want = facts(generate(llm, prompts, params))
        engine = llm.llm_engine
        core = engine.core = Prompts(engine.core, engine._assembler.module.StepKind.PREFILL)
        engine.add_request("0", prompts[0], params)
        for _ in range(5):
            engine.step()
        core.preempt(core.plans[-1].seq_ids[0])
        monkeypatch.setattr(SequenceBytes, "write", failing)
        while engine._swap.num_held == 0:
            engine._copy_swapped() if engine._in_flight is None else engine.step()
        engine.add_request("1", prompts[1], params)
        outputs, num_failed = {}, 0
        while engine.has_unfinished_requests():
            try:
                outputs |= {output.request_id: output for output in engine.step()}
            except InterruptedError:
                num_failed += 1
                monkeypatch.setattr(SequenceBytes, "write", write)
            engine.core.check_integrity()
        assert (len(num_writes), num_failed) == (1, 1)
        assert facts([outputs["0"], outputs["1"]]) == want
        engine.settle()
        check_swap(llm)
