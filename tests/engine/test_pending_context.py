"""The drafter's context is the same bits whenever it is taken in: at once, or when somebody needs it.

Engines that never propose drafts let all context wait. One of each pair takes it in at once; every now and
then both settle, and the drafter's windows of all running sequences have to be equal, however a sequence came
to its slot.
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest

from deepinfer.engine.llm_engine import LLMEngine
from deepinfer.kv_transfer.memory_store import MemoryStore
from deepinfer.models.deepseek_v41.dspark import Drafter
from deepinfer.runtime.model_runner import ModelRunner
from deepinfer.runtime.pending_context import PendingContext
from deepinfer.sampling_params import SamplingParams
from deepinfer.settings import Settings
from tests.support.engines import WatchedCore, facts, greedy, make_llm, prompt_of, watched
from tests.support.roles import engine_pair

Rings = dict[int, list[bytes]]  # by sequence: what each stage sees next

SYNC = {"use_async_scheduling": False}
LENGTHS = (3, 120, 127, 128, 140, 300)


class Counts:
    """Rows of context that have been put off, and that the drafter has taken in, in so many calls."""

    def __init__(self) -> None:
        self.put_off = self.taken_in = self.calls = 0


@contextlib.contextmanager
def never_proposing(waits: bool) -> Iterator[Counts]:
    """Steps propose nothing meanwhile; their context waits, or is taken in at once."""
    counts = Counts()
    sample, put_off, store = ModelRunner.sample, PendingContext.put_off, Drafter.store_context

    def sampled(runner: ModelRunner, inputs: Any, num_drafting: int, *args: Any) -> Any:
        return sample(runner, inputs, 0, *args)

    def waited(pending: PendingContext, context: Any) -> None:
        counts.put_off += context.positions.shape[0]
        (put_off if waits else PendingContext.take_in)(pending, context)

    def stored(drafter: Drafter, context: Any, caches: Any) -> None:
        counts.taken_in += context.positions.shape[0]
        counts.calls += 1
        store(drafter, context, caches)

    with (
        mock.patch.object(ModelRunner, "sample", sampled),
        mock.patch.object(PendingContext, "put_off", waited),
        mock.patch.object(Drafter, "store_context", stored),
    ):
        yield counts


def rings_of(engine: LLMEngine) -> Rings:
    """The windows that the drafter would see of the running sequences."""
    runner, core = engine.model_runner, engine.core
    runner.settle()
    rings: Rings = {}
    for seq_id in core.plans[-1].seq_ids.tolist():
        slot = core.state_slot(seq_id) if core.has_sequence(seq_id) else 0
        if slot == 0:
            continue
        length = core.num_computed_tokens(seq_id)
        positions = range(max(0, length - runner._drafter.window), length)
        windows = [runner._caches.window(stage.layer_id) for stage in runner._drafter.stages]
        rings[seq_id] = [
            window[slot, [p % window.shape[1] for p in positions]].numpy().tobytes() for window in windows
        ]
    return rings


class Restless(WatchedCore):
    """Preempts a sequence of the newest step before some plans."""

    def __init__(self, core: Any, rate: float) -> None:
        super().__init__(core)
        self._order, self._rate = random.Random(1), rate

    def has_sequence(self, seq_id: int) -> bool:
        with contextlib.suppress(KeyError):
            return self.status(seq_id).name == "RUNNING"
        return False

    def before_plan(self) -> None:
        if self.plans and self._order.random() < self._rate:
            with contextlib.suppress(KeyError):
                self.preempt(self._order.choice(self.plans[-1].seq_ids.tolist()))


def run(llm: Any, requests: list[tuple[list[int], SamplingParams]], rate: float) -> tuple[Any, list[Rings]]:
    """Results, and windows after every ninth step."""
    engine, seen, outputs = llm.llm_engine, [], []
    with watched(llm, Restless, rate):
        for index, (prompt, params) in enumerate(requests):
            engine.add_request(str(index), prompt, params)
        while engine.has_unfinished_requests():
            outputs += engine.step()
            if len(engine.core.plans) % 9 == 0:
                seen.append(rings_of(engine))
    return facts(sorted(outputs, key=lambda output: int(output.request_id))), seen


SCENES: dict[str, dict[str, Any]] = {
    "prompts whole": {"enable_prefix_caching": False},
    "prompts in chunks": {"enable_prefix_caching": False, "max_num_batched_tokens": 50, "max_num_seqs": 8},
    "few slots": {"enable_prefix_caching": False, "max_num_seqs": 2},
    "cached prefixes": {"max_num_seqs": 3},
    "bounded replay": {
        "enable_prefix_caching": False,
        "settings": {"replay_mode": "compact", "replay_keep_tokens": 140},
        "max_num_seqs": 3,
    },
    "recomputed": {"enable_prefix_caching": False, "preemption_mode": "recompute", "rate": 0.4},
    "swapped": {"preemption_mode": "swap", "rate": 0.4},
    "forks": {"n": 3},
    "tested by ratio": {"enable_prefix_caching": False, "ratio": True},
    "prefixes of a store": {"store": True, "max_num_seqs": 3},
}


@pytest.mark.parametrize("scene", SCENES)
def test_windows_do_not_depend_on_when_context_is_taken_in(scene):
    options = dict(SCENES[scene])
    rate, n = options.pop("rate", 0.0), options.pop("n", 1)
    settings = Settings(**SYNC, **options.pop("settings", {}))
    has_store = options.pop("store", False)
    prompts = [list(prompt_of(length)) for length in LENGTHS] * (2 if scene == "cached prefixes" else 1)
    params = [greedy(4 + 7 * (i % 3), n=n) for i in range(len(prompts))]
    if options.pop("ratio", False):
        mode = {"temperature": 1.0, "verification": "ratio", "seed": 1}
        params = [dataclasses.replace(each, **mode) for each in params]
    requests = list(zip(prompts, params))
    found, counts = [], []
    for waits in (False, True):
        store = MemoryStore(1 << 30) if has_store else None
        with never_proposing(waits) as counted:
            for _ in range(2 if has_store else 1):  # the second engine finds what the first one has kept
                with make_llm(settings=settings, **options, kv_store=store) as llm:
                    found.append(run(llm, requests, rate))
                    stats = llm.get_stats()
                    exchange = llm.llm_engine.kv_store
                    if has_store:
                        exchange.flush()
            counts.append(counted)
        if scene == "swapped":
            assert stats.num_swapped_out > 2
        if scene == "recomputed":
            assert stats.num_recomputed_rows > 100
        if scene == "cached prefixes":
            assert stats.num_cached_tokens > 100
        if has_store:
            assert exchange.stats.num_loaded > 1
    half = len(found) // 2
    assert found[:half] == found[half:]
    assert sum(len(rings) for _, seen in found for rings in seen) > 5
    assert counts[0].put_off == counts[1].put_off > 300
    assert counts[1].calls < counts[0].calls
    if scene == "few slots":  # some end before anybody needs their context
        assert counts[1].taken_in < counts[0].taken_in


class Written:
    """Writes what was handed off, and keeps the drafter's windows that it has written."""

    def __init__(self, engine: LLMEngine, records: list[Any]) -> None:
        self._write, self._runner, self._records = engine._pools.write, engine.model_runner, records

    def __call__(self, blocks: Any, slot: int, *args: Any) -> None:
        self._write(blocks, slot, *args)
        windows = [self._runner._caches.window(stage.layer_id) for stage in self._runner._drafter.stages]
        self._records.append([window[slot].numpy().copy() for window in windows])


def test_what_is_handed_off_is_settled():
    """A prompt engine's context waits until its sequences leave: the other engine drafts from it."""
    requests = {str(n): (list(prompt_of(n)), greedy(30)) for n in LENGTHS}
    found = []
    for waits in (False, True):
        records: list[Any] = []
        with (
            never_proposing(waits) as counts,
            engine_pair(settings=Settings(**SYNC), enable_prefix_caching=False) as (prompt, completion),
        ):
            for name, (tokens, params) in requests.items():
                prompt.add_request(name, tokens, params)
            completion._pools.write = Written(completion, records)
            outputs = []
            while len(outputs) < len(requests):
                prompt.step()
                outputs += completion.step()
            while prompt.has_unfinished_requests():
                prompt.step()
        found.append((facts(sorted(outputs, key=lambda each: int(each.request_id))), records, counts.put_off))
    (eager, rings, put_off), (late, late_rings, late_put_off) = found
    assert eager == late and put_off == late_put_off > 300 and len(rings) == len(late_rings) == len(LENGTHS)
    window = 128
    for index, (ours, theirs) in enumerate(zip(rings, late_rings)):
        for one, other in zip(ours, theirs):
            length = LENGTHS[index]
            places = [p % one.shape[0] for p in range(max(0, length - window), length)]
            assert (one[places] == other[places]).all(), f"{length=}"
