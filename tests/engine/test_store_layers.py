"""Layers of a stored prefix arrive under the forward that reads them: what overlaps, what a torn one does."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from deepinfer.engine.arrivals import ArrivalGate
from deepinfer.kv_transfer import memory_store
from deepinfer.kv_transfer.entry import DamagedEntryError
from deepinfer.kv_transfer.memory_store import MemoryStore
from deepinfer.models.deepseek_v41.layer import Layer
from deepinfer.sampling_params import SamplingParams
from deepinfer.settings import Settings
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
)

NUM_LAYERS = 8  # of the backbone; the drafter's follow
PARAMS = SamplingParams(temperature=0.8, max_tokens=8, seed=5, logprobs=1, ignore_eos=True)


def filled_store(prompts: list[list[int]], settings: Settings) -> MemoryStore:
    store = MemoryStore(1 << 30)
    with make_llm(kv_store=store, settings=settings) as llm:
        generate(llm, prompts, greedy(1))
    return store


_expected: dict[str, list[Any]] = {}


def expected(prompts: list[list[int]]) -> list[Any]:
    """Facts of the plain engine."""
    key = str(prompts)
    if key not in _expected:
        with make_cold_llm(settings=PLAIN_STEPS) as llm:
            _expected[key] = facts(generate(llm, prompts, PARAMS))
    return _expected[key]


def on_read(monkeypatch: pytest.MonkeyPatch, before: Callable[[Any, int], None]) -> None:
    """Call `before(entry, layer)` in front of each section that the loader reads."""
    read = memory_store._Kept._read

    def reading(self: Any, section: int, out: memoryview) -> None:
        before(self, int(self.header.sections[section][0].split(".")[0]))
        read(self, section, out)

    monkeypatch.setattr(memory_store._Kept, "_read", reading)


class Layers:
    """Which layers have run since the last reset."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.have_run = [threading.Event() for _ in range(NUM_LAYERS + 3)]
        feed_forward = Layer.feed_forward

        def running(layer: Layer, *args: Any) -> Any:
            result = feed_forward(layer, *args)
            self.have_run[layer.layer_id].set()
            return result

        monkeypatch.setattr(Layer, "feed_forward", running)

    def reset(self) -> None:
        for event in self.have_run:
            event.clear()


@pytest.mark.parametrize(("use_async", "num_drafts"), [(True, 5), (False, 5), (True, 0)])
def test_a_layer_is_read_when_the_one_before_has_run(
    use_async: bool, num_drafts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store gives out a layer's bytes only when the same forward has run the layer before."""
    settings = Settings(use_async_scheduling=use_async, num_draft_tokens=num_drafts)
    prompts = [list(prompt_of(300))]
    store, wanted = filled_store(prompts, settings), expected(prompts)
    layers = Layers(monkeypatch)
    refused = []

    def read(_: Any, layer: int) -> None:
        before = min(layer, NUM_LAYERS) - 1
        if before >= 0 and not layers.have_run[before].wait(20):
            refused.append(layer)
            raise DamagedEntryError(f"layer {before} has not run")

    with make_llm(kv_store=store, settings=settings) as llm:
        layers.reset()
        on_read(monkeypatch, read)
        outputs = generate(llm, prompts, PARAMS)
        stats = llm.llm_engine.kv_store.stats
    assert not refused and facts(outputs) == wanted and outputs[0].num_cached_tokens == 256
    assert (stats.num_loaded, stats.num_failed) == (1, 0)
    # All but the last; without a drafter the last layer of the backbone ends it.
    assert stats.num_early_layers >= NUM_LAYERS - 1


@pytest.mark.parametrize(
    ("torn", "use_async"),
    [
        (0, True),
        (3, True),
        (3, False),
        (NUM_LAYERS - 1, True),
        (NUM_LAYERS + 2, True),
        (NUM_LAYERS + 2, False),
    ],
)
def test_a_torn_layer_under_a_running_forward(
    torn: int, use_async: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever has read it is computed anew, equal prompts and longer ones as well; others notice nothing."""
    settings = Settings(use_async_scheduling=use_async)
    bad, good, other = (list(prompt_of(length, length)) for length in (270, 271, 140))
    prompts = [bad, good, bad, bad + list(prompt_of(60)), other]
    store, wanted = filled_store([bad, good], settings), expected(prompts)
    layers = Layers(monkeypatch)
    head = np.array(bad[:16], "<i4").tobytes()
    torn_after: list[bool] = []

    def read(entry: Any, layer: int) -> None:
        if layer == torn and entry.header.token_ids.startswith(head):
            if torn > 0:
                torn_after.append(layers.have_run[min(torn, NUM_LAYERS) - 1].wait(20))
            raise DamagedEntryError("torn")

    with make_llm(kv_store=store, settings=settings) as llm:
        layers.reset()
        on_read(monkeypatch, read)
        outputs = generate(llm, prompts, PARAMS)
        assert facts(outputs) == wanted
        stats = llm.llm_engine.kv_store.stats
        assert stats.num_failed >= 1 and stats.num_loaded == 1
        assert outputs[0].num_cached_tokens == 0 and outputs[1].num_cached_tokens == 256
        assert all(torn_after) and bool(torn_after) == (torn > 0)
        monkeypatch.undo()
        assert facts(generate(llm, prompts, PARAMS)) == wanted  # nothing of it is in the cache
        assert_idle(llm)


@pytest.mark.parametrize("use_async", [True, False])
def test_a_forward_that_fails_at_its_gate(use_async: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupt in the middle: what was on its way is forgotten, and the sequence computed."""
    settings = Settings(use_async_scheduling=use_async)
    prompts = [list(prompt_of(400)), list(prompt_of(300, 1))]
    store, wanted = filled_store(prompts[:1], settings), expected(prompts)
    feed_forward, count = Layer.feed_forward, [0]

    def failing(layer: Layer, *args: Any) -> Any:
        count[0] += 1
        if count[0] == 4:
            raise InterruptedError("in layer 3")
        return feed_forward(layer, *args)

    with make_llm(kv_store=store, settings=settings) as llm:
        engine = llm.llm_engine
        monkeypatch.setattr(Layer, "feed_forward", failing)
        for number, prompt in enumerate(prompts):
            engine.add_request(str(number), prompt, PARAMS)
        results, num_failed = {}, 0
        while engine.has_unfinished_requests():
            try:
                results |= {output.request_id: output for output in engine.step()}
            except InterruptedError:
                num_failed += 1
            engine.core.check_integrity()
        engine.settle()
        assert num_failed == 1 and facts([results["0"], results["1"]]) == wanted
        assert_idle(llm)


def test_a_store_that_raises(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Another program's store may be faulty: its prefix is computed, and the fault is logged."""
    prompts = [list(prompt_of(400))]
    store, wanted = filled_store(prompts, Settings()), expected(prompts)

    def read(_: Any, layer: int) -> None:
        if layer == 2:
            raise RuntimeError("broken")

    with make_llm(kv_store=store) as llm:
        on_read(monkeypatch, read)
        outputs = generate(llm, prompts, PARAMS)
        assert facts(outputs) == wanted and outputs[0].num_cached_tokens == 0
    assert "broken" in caplog.text


def test_loads_that_no_step_follows() -> None:
    """Room for one sequence only: what arrives for the second waits for no forward."""
    prompts = [list(prompt_of(400, seed)) for seed in range(4)]
    store, wanted = filled_store(prompts, Settings()), expected(prompts)
    with make_llm(
        kv_store=store, num_prefix_states=0, max_num_seqs=1, num_blocks=6, max_model_len=640
    ) as llm:
        outputs = generate(llm, prompts, PARAMS)
        assert facts(outputs) == wanted
        stats = llm.llm_engine.kv_store.stats
        assert stats.num_lookups == 4 and stats.num_loaded + stats.num_failed == 4


class Decodes(WatchedCore):
    """What can decode goes before any prompt."""

    def __init__(self, core: Any, decode: Any) -> None:
        super().__init__(core)
        self._decode = decode

    def schedule(self, *args: Any) -> Any:
        return self._core.schedule(self._decode) or self._core.schedule()


@pytest.mark.parametrize("use_async", [True, False])
def test_what_waits_for_a_slot_comes_before_what_arrives_in_it(
    use_async: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The state may come into the slot of a sequence that has ended and whose drafter's rows still wait."""
    prompts = [list(prompt_of(400)), list(prompt_of(60, 1))]
    settings = Settings(use_async_scheduling=use_async)
    store, events = filled_store(prompts[:1], settings), []
    with make_llm(kv_store=store, settings=settings) as llm:
        engine = llm.llm_engine
        runner = engine.model_runner
        forward, settle, bring = runner.forward, runner.settle, ArrivalGate._bring

        def logged_forward(gate: ArrivalGate | None = None) -> None:
            if gate is not None:
                events.append("step without copies" if runner._copies is None else "step")
            forward(gate)

        monkeypatch.setattr(runner, "forward", logged_forward)
        monkeypatch.setattr(runner, "settle", lambda: (events.append("settle"), settle()))
        monkeypatch.setattr(ArrivalGate, "_bring", lambda *args: (events.append("bring"), bring(*args)))
        engine.add_request("1", prompts[1], greedy(20))
        engine.step()
        engine.core = Decodes(engine.core, engine._assembler.module.StepKind.DECODE)
        engine.add_request("0", prompts[0], greedy(20))  # its prefix comes in below a decode step
        while engine.has_unfinished_requests():
            engine.step()
        engine.settle()
        assert_idle(llm)
    begin = events.index("step without copies")
    assert events[begin + 1 : begin + 3] == ["settle", "bring"]
