"""Graphs and the stream executor: replayed = eager, async = sync, on a stand-in and on a GPU."""

from __future__ import annotations

import dataclasses
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from deepinfer.engine.executor import Executor
from deepinfer.engine.stream_executor import StreamExecutor
from deepinfer.platform.base import GraphMemoryError
from deepinfer.platform.nvidia import GraphCapture
from deepinfer.runtime.graph_sizes import (
    candidate_sizes,
    context_bounds,
    fitting,
    sizes_worth_having,
    spaced_sizes,
)
from deepinfer.runtime.graphs import DecodeGraphs, GraphSizes
from deepinfer.utils.aside import aside
from deepinfer.utils.sync_guard import SyncGuard
from deepinfer.utils.timer import QueueTimers
from tests.support.fake_queue import CPU, FakeQueue
from tests.support.table_model import drive, make_runner, requests

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA device")
SIZES = GraphSizes(rows=(2, 5, 16, 44), bounds=(130, 512), drafting=(1, 4, 11), is_chosen=True)
LAZY = dataclasses.replace(SIZES, is_lazy=True)


def open_queue(place: str) -> tuple[torch.device, Any]:
    if place == "cpu":
        return CPU, FakeQueue()
    from deepinfer.platform.nvidia import CudaQueue

    device = torch.device("cuda", 0)
    return device, CudaQueue(device, SyncGuard(True))


def make_executor(
    place: str, *, with_graphs: bool, rows_at_once: int = 7, sizes: GraphSizes = SIZES
) -> tuple[Any, Any, torch.device]:
    """A stream executor over the table model, its runner and the device."""
    device, queue = open_queue(place)
    runner, parts = make_runner(device, is_queued=True)
    runner.timers = QueueTimers(queue.mark)
    if with_graphs:
        graphs = DecodeGraphs(
            parts.pop("model"),
            parts.pop("drafter"),
            parts.pop("caches"),
            parts.pop("sampler"),
            **parts,
            rows_at_once=rows_at_once,
            capture=queue.capture(),
            sizes=sizes,
        )
        graphs.build()
        runner.graphs = graphs
    return StreamExecutor(runner, queue), runner, device


def plain(count: int, num_steps: int, *, is_queued: bool) -> list[Any]:
    """What a CPU gives, each step committed before the next, with its own operators or the references."""
    runner, _ = make_runner(CPU, is_queued=is_queued)
    return drive(Executor(runner, use_thread=False), CPU, requests(count), num_steps, is_async=False)


@pytest.mark.parametrize("place", ["cpu", pytest.param("cuda", marks=needs_gpu)])
@pytest.mark.parametrize("count", [3, 11])
def test_replayed_and_eager_steps_give_the_same(place, count):
    expected = plain(count, 6, is_queued=place == "cuda")  # there the native operators may be missing
    assert len({str(step) for step in expected}) == 6
    assert any(emitted > 1 for step in expected for emitted in step[2]) or count == 1, "drafts were accepted"
    for with_graphs in (False, True):
        for is_async in (False, True):
            executor, runner, device = make_executor(place, with_graphs=with_graphs)
            found = drive(executor, device, requests(count), 6, is_async)
            for step, (got, wanted) in enumerate(zip(found, expected, strict=True)):
                assert got[:4] == wanted[:4], f"{with_graphs=} {is_async=} {step=}"
                assert torch.allclose(torch.tensor(got[4]), torch.tensor(wanted[4]), atol=1e-6)
            assert (runner.num_graph_steps, runner.num_eager_steps) == ((6, 0) if with_graphs else (0, 6))
            executor.drain()
            assert executor.busy_seconds > 0 and executor.idle_seconds >= 0
            assert set(runner.timers.seconds) == {"forward", "sample", "draft"}
            assert runner._caches.counters.query_rows >= 6 * count, "replays count what they do"


@pytest.mark.parametrize("place", ["cpu", pytest.param("cuda", marks=needs_gpu)])
def test_graphs_on_demand(place):
    executor, runner, device = make_executor(place, with_graphs=True, sizes=LAZY)
    assert runner.graphs._forwards == {} and runner.graphs._samples == {}
    found = drive(executor, device, requests(3), 4, is_async=True)
    expected = plain(3, 4, is_queued=place == "cuda")
    assert [step[:4] for step in found] == [step[:4] for step in expected]
    assert set(runner.graphs._forwards) == {(5, 130), (16, 130)} and set(runner.graphs._proposals) == {4}
    assert runner.num_graph_steps == 4


def test_counters_of_replays():
    executor, runner, device = make_executor("cpu", with_graphs=True)
    assert runner._caches.counters.query_rows == 0
    drive(executor, device, requests(3), 2, is_async=False)
    assert runner._caches.counters.query_rows == 5 + 16, "3 rows, then 12, each padded"


def test_what_no_graph_holds_is_eager():
    executor, runner, device = make_executor("cpu", with_graphs=True)
    running = requests(2)
    running[0].tokens = [7] * 600  # beyond the longest context
    drive(executor, device, running, 2, is_async=False)
    assert (runner.num_graph_steps, runner.num_eager_steps) == (0, 2)


@pytest.mark.parametrize("place", ["cpu", pytest.param("cuda", marks=needs_gpu)])
def test_a_fault_shows_in_the_result_of_its_step(place):
    executor, runner, device = make_executor(place, with_graphs=False)

    def trouble(hidden: Any) -> None:
        raise ArithmeticError("a forward that fails")

    runner._model.trouble = trouble
    with pytest.raises(ArithmeticError, match="a forward that fails"):
        drive(executor, device, requests(2), 1, is_async=False)
    executor.drain()
    runner._model.trouble = lambda hidden: None
    drive(executor, device, requests(2), 2, is_async=False)


@needs_gpu
def test_a_hidden_wait_is_an_error():
    executor, runner, device = make_executor("cuda", with_graphs=False)
    runner._model.trouble = lambda hidden: hidden.sum().item()
    with pytest.raises(RuntimeError, match="synchronizing"):
        drive(executor, device, requests(2), 1, is_async=False)
    executor.drain()
    assert executor.run(lambda: runner._caches.slots.sum().item()).result() >= 0, "work on the pools may wait"


@needs_gpu
def test_a_graph_that_does_not_fit_says_what_to_lower():
    _, queue = open_queue("cuda")
    too_much = torch.cuda.get_device_properties(0).total_memory

    with pytest.raises(GraphMemoryError, match=r"44 rows.*DEEPINFER_CUDAGRAPH_BATCH"):
        queue.capture()(lambda: torch.empty(too_much, dtype=torch.uint8, device="cuda"), "44 rows")


@pytest.mark.parametrize("place", ["joined", "unjoined", pytest.param("cuda", marks=needs_gpu)])
def test_memory_runs_out_while_work_is_aside(place, monkeypatch):
    """What is raised is what made the capture stop, which leaves nothing that hinders the next one.

    Stand-ins end the stopped capture well or badly; torch takes no other graph into its pool either way.
    """
    runs, pools = [], []

    def work():
        runs.append(torch.ones(8, device="cuda" if place == "cuda" else "cpu"))
        waiting = aside(runs[-1].device, torch.exp, runs[-1])
        if len(runs) == 2:
            raise torch.OutOfMemoryError("no room")
        waiting.result()

    if place != "cuda":

        class Graph:
            def capture_begin(self, pool: object, **_: Any) -> None:
                pools.append(pool)

            def capture_end(self) -> None:
                if len(pools) == 1 and place == "unjoined":
                    raise RuntimeError("capturing stream has unjoined work")

            def replay(self) -> None:
                pass

        for name, stand_in in (("CUDAGraph", Graph), ("graph_pool_handle", object), ("stream", nullcontext)):
            monkeypatch.setattr(torch.cuda, name, stand_in)
        stream = SimpleNamespace(synchronize=lambda: None, cuda_stream=-1)
        capture = GraphCapture(SimpleNamespace(stream=stream, waiting=nullcontext))
    else:
        capture = open_queue(place)[1].capture()
    with pytest.raises(GraphMemoryError, match="of 8 rows"):
        capture(work, "8 rows")
    capture(work, "8 rows again")()
    if place == "cuda":
        torch.cuda.synchronize()
    else:
        assert len(pools) == 2 and pools[0] is not pools[1]


def test_sizes():
    assert candidate_sizes(20) == [1, 2, 3, 4, 6, 8, 12, 16, 20]
    assert candidate_sizes(1) == [1]
    assert len(candidate_sizes(1536)) == 21
    assert spaced_sizes(20, 8) == [1, 2, 4, 8, 16, 20]
    assert len(spaced_sizes(1536, 8)) == 195
    assert spaced_sizes(3, 8) == [1, 2, 3]
    assert context_bounds(131072) == [8192, 32768, 131072]
    assert context_bounds(1000) == [1000]
    assert (fitting([2, 5], 3), fitting([2, 5], 5), fitting([2, 5], 6)) == (5, 5, None)


def test_few_sizes_keep_every_step_within_the_waste():
    flat = {size: 5.0 + 0.01 * size for size in candidate_sizes(1536)}
    kept = sizes_worth_having(flat, 0.1)
    assert kept[-1] == 1536 and len(kept) < len(flat)
    for size, ms in flat.items():
        used = fitting(kept, size)
        between = [other for other in flat if size <= other < used]
        assert flat[used] <= 1.1 * ms or not between or used == size, f"{size} runs as {used}"
    assert sizes_worth_having({1: 1.0, 2: 1.0, 4: 1.05, 8: 1.1}, 0.1) == [8]
    assert sizes_worth_having({1: 1.0, 2: 2.0, 4: 4.0}, 0.1) == [1, 2, 4]
