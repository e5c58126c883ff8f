"""Asynchronous scheduling: what overlaps, what a late end costs, what faults and interrupts leave behind."""

from __future__ import annotations

import itertools
import os
import random
import signal
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from deepinfer.outputs import RequestOutput
from deepinfer.runtime.model_runner import ModelRunner
from deepinfer.sampling_params import SamplingParams
from deepinfer.settings import Settings
from tests.engine.matrix import DisturbedCore, bundled_prompts
from tests.support.engines import (
    WatchedCore,
    assert_idle,
    facts,
    generate,
    greedy,
    make_llm,
    prompt_of,
    watched,
)

SYNC, ASYNC = (Settings(num_draft_tokens=5, use_async_scheduling=flag) for flag in (False, True))
PLAIN_ASYNC = Settings(num_draft_tokens=0, use_async_scheduling=True)


class LateCore(WatchedCore):
    """Finds the work done for sequences that had ended.

    Attributes:
        late_slots: by sequence, plans that hold it behind the one that ended it.
        num_late_rows: query rows of those.
        reasons: by sequence, why it ended.
    """

    def __init__(self, core: Any) -> None:
        super().__init__(core)
        self.late_slots: dict[int, int] = {}
        self.num_late_rows = 0
        self.reasons: dict[int, int] = {}

    def commit(self, plan: Any, tokens: Any, **results: Any) -> Any:
        for seq_id, rows in zip(plan.seq_ids.tolist(), plan.seqlens_q.tolist(), strict=True):
            if seq_id in self.late_slots:
                self.late_slots[seq_id] += 1
                self.num_late_rows += rows
        result = self._core.commit(plan, tokens, **results)
        for seq_id, reason in zip(
            result.finished_ids.tolist(), result.finished_reasons.tolist(), strict=True
        ):
            self.late_slots[seq_id] = 0
            self.reasons[seq_id] = reason
        return result


@pytest.fixture(scope="module")
def llm() -> Iterator[Any]:
    with make_llm(settings=ASYNC) as llm:
        yield llm


# --- what a late end costs ----------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [ASYNC, PLAIN_ASYNC], ids=["5 drafts", "no drafts"])
def test_a_late_end_costs_at_most_one_slot(settings):
    """EOS is seen one step late: that step has computed the sequence once more, and no step after it has."""
    prompts = list(map(list, bundled_prompts()[:12])) * 2
    params = [SamplingParams(temperature=i % 2, seed=i, max_tokens=50) for i in range(len(prompts))]
    with make_llm(settings=settings) as llm, watched(llm, LateCore) as core:
        outputs = generate(llm, prompts, params)
    ended = [output.outputs[0].finish_reason for output in outputs]
    assert ended.count("stop") > 12
    assert len(core.late_slots) == len(prompts) and max(core.late_slots.values()) == 1
    assert sum(core.late_slots.values()) >= ended.count("stop") - 1, "but the last one has nobody behind it"
    rows = 1 + settings.num_draft_tokens
    assert core.num_late_rows <= rows * sum(core.late_slots.values())


def test_an_end_by_length_is_foreseen():
    """Without drafts the host knows the step that fills a request, so no row is computed for nothing."""
    prompts = [list(prompt_of(5, seed)) for seed in range(8)]
    params = [greedy(3 + i) for i in range(8)]
    with make_llm(settings=PLAIN_ASYNC) as llm, watched(llm, LateCore) as core:
        generate(llm, prompts, params)
    assert core.num_late_rows == 0 and len(core.late_slots) == 8


def test_no_step_is_late_without_asynchrony():
    with make_llm(settings=SYNC) as llm, watched(llm, LateCore) as core:
        generate(llm, list(map(list, bundled_prompts()[:8])), SamplingParams(temperature=0, max_tokens=40))
    assert core.num_late_rows == 0


# --- what overlaps ------------------------------------------------------------------------------------------


class OverlapCore(DisturbedCore):
    """Notes for every plan its kind, and whether it was made with a step in flight.

    Attributes:
        kinds: (is prefill, had a step in flight) per plan.
    """

    def __init__(self, core: Any) -> None:
        super().__init__(core)
        self.kinds: list[tuple[bool, bool]] = []

    def schedule(self, *args: Any) -> Any:
        had_step_in_flight = self.num_in_flight > 0
        plan = super().schedule(*args)
        if plan is not None:
            self.kinds.append((plan.is_prefill, had_step_in_flight))
        return plan


def test_switches_between_prefill_and_decode_do_not_drain(llm):
    """Requests arrive while others decode: every plan but the first is made under a running step."""
    engine = llm.llm_engine
    with watched(llm, OverlapCore) as core:
        for row in range(6):
            engine.add_request(str(row), list(prompt_of(10 + 20 * row, row)), greedy(60))
            for _ in range(3):
                engine.step()
        while engine.has_unfinished_requests():
            engine.step()
        engine.settle()
    assert_idle(llm)
    kinds = core.kinds
    switches = [(a[0], b[0]) for a, b in itertools.pairwise(kinds) if a[0] != b[0]]
    assert switches.count((False, True)) == 5 and switches.count((True, False)) == 6
    steady = [had_step_in_flight for _, had_step_in_flight in kinds[1:-3]]
    assert all(steady), kinds
    assert kinds[0] == (True, False)


def test_a_step_is_launched_before_the_one_before_it_is_committed(llm):
    """The order on the host: plan N, launch N, commit N - 1, parameters of N."""
    order: list[str] = []

    def noting(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            order.append(name)
            return function(*args, **options)

        return call

    engine = llm.llm_engine
    executor, builder = engine._executor, engine._builder
    with (
        mock.patch.object(executor, "forward", noting("launch", executor.forward)),
        mock.patch.object(builder, "sampling", noting("parameters", builder.sampling)),
        watched(llm) as core,
    ):
        core.commit = noting("commit", core.commit)
        core.schedule = noting("plan", core.schedule)
        generate(llm, [list(prompt_of(9))], greedy(20))
    text = " ".join(order)
    start, step = "plan launch parameters", "plan launch commit parameters"
    assert text.startswith(f"{start} {step} {step}")
    assert text.count("launch") == text.count("commit") > 4


@pytest.mark.parametrize("settings", [SYNC, ASYNC], ids=["sync", "async"])
def test_host_time_hides_under_the_device(settings):
    """On a clock that only commits advance: they are the device's idle time, or pass while it works.

    The device holds each step until the one before it is committed; a commit with a step launched behind it
    begins when the device is at that step.
    """
    begun, committed = defaultdict(threading.Event), defaultdict(threading.Event)
    steps, hidden = itertools.count(), []
    now, num_launched, num_commits = 0.0, 0, 0

    class TickingCore(WatchedCore):
        def commit(self, *args: Any, **results: Any) -> Any:
            nonlocal now, num_commits
            if num_launched > num_commits + 1:
                assert begun[num_commits + 1].wait(60), "launched and not begun"
                hidden.append(num_commits)
            now += 1.0
            committed[num_commits].set()
            num_commits += 1
            return self._core.commit(*args, **results)

    with make_llm(settings=settings) as llm:
        executor = llm.llm_engine._executor
        launch, run = executor.forward, executor._runner.forward

        def launching(*args: Any) -> Any:
            nonlocal num_launched
            num_launched += 1
            return launch(*args)

        def running(*args: Any) -> Any:
            step = next(steps)
            begun[step].set()
            assert step == 0 or committed[step - 1].wait(60), "begun and the step before it not committed"
            return run(*args)

        with (
            mock.patch("deepinfer.engine.executor.time", SimpleNamespace(perf_counter=lambda: now)),
            mock.patch.object(executor, "forward", launching),
            mock.patch.object(executor._runner, "forward", running),
            watched(llm, TickingCore),
        ):
            generate(llm, [list(prompt_of(9, seed)) for seed in range(4)], greedy(24))
        idle, busy = executor.idle_seconds, executor.busy_seconds
    assert num_commits > 5
    if settings.use_async_scheduling:  # nothing is behind the last one
        assert (len(hidden), busy, idle) == (num_commits - 1, num_commits - 1, 0)
    else:
        assert (len(hidden), busy, idle) == (0, 0, num_commits - 1)


# --- faults and interrupts ----------------------------------------------------------------------------------

PROMPTS = [list(prompt_of(length, 4)) for length in (3, 70, 130, 9, 200)]
PARAMS = [
    SamplingParams(temperature=i % 2, seed=i, max_tokens=24, ignore_eos=True, logprobs=1) for i in range(5)
]


@pytest.fixture(scope="module")
def want(llm):
    return facts(generate(llm, PROMPTS, PARAMS))


def drive(engine: Any, errors: type[BaseException] | tuple[type[BaseException], ...]) -> tuple[dict, int]:
    """Step to the end, going on after errors; results by row, and the number of errors."""
    done: dict[int, RequestOutput] = {}
    count = 0
    while engine.has_unfinished_requests():
        try:
            done.update((int(output.request_id), output) for output in engine.step())
        except errors:
            count += 1
    engine.settle()
    return done, count


@pytest.mark.parametrize(
    ("what", "error"),
    [
        *((what, RuntimeError("broken")) for what in ("forward", "sample", "_propose", "_verify")),
        ("sample", MemoryError("full")),
        ("forward", SystemExit(3)),
    ],
)
def test_a_fault_of_the_device_reaches_the_caller_and_loses_nothing(llm, want, what, error):
    """Every fifth call fails, with a step before it uncommitted and one behind it launched."""
    original = getattr(ModelRunner, what)
    calls = iter(range(1, 10_000))

    def failing(self: ModelRunner, *args: Any) -> Any:
        number = next(calls)
        if number % 5 == 0 and number < 30:
            raise error
        return original(self, *args)

    engine = llm.llm_engine
    with mock.patch.object(ModelRunner, what, failing):
        for row, (prompt, params) in enumerate(zip(PROMPTS, PARAMS, strict=True)):
            engine.add_request(str(row), prompt, params)
        done, count = drive(engine, type(error))
    assert_idle(llm)
    assert count >= 2
    assert facts([done[row] for row in range(len(PROMPTS))]) == want
    assert facts(generate(llm, PROMPTS, PARAMS)) == want


def test_a_fault_ends_a_call_and_only_that(llm, want):
    with mock.patch.object(ModelRunner, "sample", side_effect=ValueError("no tokens today")):
        with pytest.raises(ValueError, match="no tokens today"):
            llm.generate(PROMPTS, PARAMS, use_tqdm=False)
        assert_idle(llm)
    assert facts(generate(llm, PROMPTS, PARAMS)) == want


def test_signals_while_the_host_waits(llm, want, seed):
    """Ctrl-C at random moments; most of them find the host waiting for the device."""
    engine, order = llm.llm_engine, random.Random(seed)
    for row, (prompt, params) in enumerate(zip(PROMPTS, PARAMS, strict=True)):
        engine.add_request(str(row), prompt, params)
    is_over = threading.Event()

    def interrupt() -> None:
        for _ in range(15):
            if is_over.wait(order.uniform(0.001, 0.15)):
                return
            os.kill(os.getpid(), signal.SIGINT)

    sender = threading.Thread(target=interrupt)
    done: dict[int, RequestOutput] = {}
    count = 0
    sender.start()
    try:
        while engine.has_unfinished_requests() or sender.is_alive():
            try:
                for output in engine.step():
                    done[int(output.request_id)] = output
            except KeyboardInterrupt:
                count += 1
    except KeyboardInterrupt:  # between two steps
        pass
    finally:
        is_over.set()
        while sender.is_alive():
            try:
                sender.join()
            except KeyboardInterrupt:
                pass
    rest, _ = drive(engine, ())
    done |= rest
    assert_idle(llm)
    assert count > 0
    # A result that was on its way to the caller when the signal came may be lost, but never wrong.
    for row, output in done.items():
        assert facts([output]) == want[row : row + 1]
    assert facts(generate(llm, PROMPTS, PARAMS)) == want


@pytest.mark.parametrize("num_steps", [0, 1, 2, 5])
def test_close_with_work_in_flight(num_steps):
    before = set(threading.enumerate())
    llm = make_llm(settings=ASYNC)
    engine = llm.llm_engine
    for row, (prompt, params) in enumerate(zip(PROMPTS, PARAMS, strict=True)):
        engine.add_request(str(row), prompt, params)
    for _ in range(num_steps):
        engine.step()
    llm.close()
    llm.close()
    assert set(threading.enumerate()) <= before, "the device's thread has ended"
    assert engine.core.num_in_flight == 0 and engine.core.num_unfinished == 0
    with pytest.raises(RuntimeError, match="closed"):
        engine.step()


def test_close_after_a_fault_in_flight():
    llm = make_llm(settings=ASYNC)
    llm.llm_engine.add_request("a", PROMPTS[0], PARAMS[0])
    llm.llm_engine.step()
    llm.llm_engine._executor.drain()  # the first forward is past the fault that follows
    with mock.patch.object(ModelRunner, "forward", side_effect=RuntimeError("broken")):
        llm.llm_engine.step()
        before = llm.llm_engine.core.num_in_flight
        llm.close()
    assert (before, llm.llm_engine.core.num_in_flight, llm.llm_engine.core.num_unfinished) == (1, 0, 0)
    with pytest.raises(RuntimeError, match="closed"):
        llm.llm_engine.step()


def test_aborts_from_another_thread_while_steps_are_in_flight(llm, want, seed):
    """Whoever is not aborted gets its whole result; whoever is gets the beginning of it."""
    engine, order = llm.llm_engine, random.Random(seed)
    for _ in range(4):
        for row, (prompt, params) in enumerate(zip(PROMPTS, PARAMS, strict=True)):
            engine.add_request(str(row), prompt, params)
        doomed = order.sample(range(len(PROMPTS)), 3)

        def abort(doomed: list[int] = doomed) -> None:
            for row in doomed:
                time.sleep(order.uniform(0, 0.05))
                engine.abort_request(str(row))

        thread = threading.Thread(target=abort)
        thread.start()
        done, _ = drive(engine, ())
        thread.join()
        assert_idle(llm)
        assert sorted(done) == list(range(len(PROMPTS)))
        for row, output in done.items():
            (sample,) = output.outputs
            if sample.finish_reason != "abort":
                assert facts([output]) == want[row : row + 1]
                continue
            assert row in doomed
            _, tokens, _, values, *_ = want[row][3][0]
            count = len(sample.token_ids)
            assert (sample.token_ids, sample.token_logprobs) == (tokens[:count], values[:count])


def test_two_engines_take_turns(llm, want):
    """Each has a device thread and a step in flight of its own."""
    with make_llm(settings=PLAIN_ASYNC) as other:
        engines = [llm.llm_engine, other.llm_engine]
        found: list[dict[int, RequestOutput]] = [{}, {}]
        for engine in engines:
            for row, (prompt, params) in enumerate(zip(PROMPTS, PARAMS, strict=True)):
                engine.add_request(str(row), prompt, params)
        overlapped = 0
        while any(engine.has_unfinished_requests() for engine in engines):
            for engine, done in zip(engines, found, strict=True):
                if engine.has_unfinished_requests():
                    done.update((int(output.request_id), output) for output in engine.step())
            overlapped += all(engine.core.num_in_flight > 0 for engine in engines)
        for engine in engines:
            engine.settle()
        assert overlapped > 5
        for done in found:
            assert facts([done[row] for row in range(len(PROMPTS))]) == want
        assert_idle(llm)
        assert_idle(other)


def test_two_engines_in_two_threads(llm, want):
    with make_llm(settings=SYNC) as other:
        found: dict[str, Any] = {}
        threads = [
            threading.Thread(
                target=lambda name=name, each=each: found.update({name: generate(each, PROMPTS, PARAMS)})
            )
            for name, each in (("async", llm), ("sync", other))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert facts(found["async"]) == facts(found["sync"]) == want
