"""StreamExecutor: the executor of a device that works through a queue by itself.

Launches go out from the caller's thread and return at once. Nothing waits for the device but a result that is
asked for; it comes through page-locked memory on a second queue, so copies run beside the next forward.

    steps     | forward N | sample N | forward N+1            | sample N+1 (behind the copies of N)
    copies                           | results of N to host |
    host                             launches N+1 ... waits for the copies' mark

Steps with grammars look at their tokens between launches, and work on the pools (swap, stores) copies to and
from pageable memory: these wait for the device inside the call, and say so to the guard.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np

from deepinfer.models.base import LayerGate
from deepinfer.platform.base import DeviceQueue, Mark
from deepinfer.runtime.async_batch import Remap
from deepinfer.runtime.batch import Batch, CacheCopies
from deepinfer.runtime.model_runner import ModelRunner
from deepinfer.runtime.step_output import StepResult
from deepinfer.sampling.inputs import SamplingInputs
from deepinfer.structured_output.step import StepGrammars
from deepinfer.utils.timer import Timers

T = TypeVar("T")


class QueuedResult(Generic[T]):
    """What the device's queue will have made; the part of `Future` that callers use.

    Args:
        mark: reached when it is there.
        make: makes it then.
    """

    def __init__(self, mark: Mark, make: Callable[[], T]) -> None:
        self._mark = mark
        self._make: Callable[[], T] | None = make
        self._value: T

    def done(self) -> bool:
        """Whether `result` returns at once."""
        return self._make is None or self._mark.query()

    def result(self) -> T:
        """Wait for it; raises what the device has raised."""
        if self._make is not None:
            self._mark.synchronize()
            self._value = self._make()
            self._make = None
        return self._value


@dataclass(frozen=True)
class _Launch:
    """A stretch of the queue."""

    before: Mark | None  # the end of the launch before, of the same run
    start: Mark
    end: Mark


class StreamExecutor:
    """Runs a ModelRunner's launches in order; the interface of `Executor`.

    Args:
        runner: the device's work.
        queue: where it goes.

    Attributes:
        queue: the device's.
        host_timers: time that launching took, by section.
    """

    def __init__(self, runner: ModelRunner, queue: DeviceQueue) -> None:
        self._runner = runner
        self.queue = queue
        self._failure: Exception | None = None  # of the newest forward's launch
        self._forward: _Launch | None = None
        self._last_end: Mark | None = None
        self._open: deque[_Launch] = deque()
        self._busy_seconds = self._idle_seconds = 0.0
        self.host_timers = Timers()

    def forward(
        self,
        batch: Batch,
        remap: Remap | None,
        copies: CacheCopies | None = None,
        gate: LayerGate | None = None,
    ) -> Future[np.ndarray | None] | QueuedResult[np.ndarray | None]:
        """Queue a step's backbone; a fault shows in the result of the `sample` that follows.

        See `Executor.forward`.
        """
        self._failure = None
        dealt: Future[np.ndarray | None] | QueuedResult[np.ndarray | None] = _done(None)
        with self._launch("launch_forward", waits=gate is not None) as self._forward:
            try:
                rows = self._runner.prepare(batch, remap, copies)
                if rows is not None:
                    (host_rows,), mark = self.queue.fetch([rows])
                    dealt = QueuedResult(mark, lambda: host_rows.numpy())
                self._runner.forward(gate)
            except Exception as error:
                self._failure = error
        return dealt

    def sample(
        self, inputs: SamplingInputs, num_drafting: int, grammars: StepGrammars | None = None
    ) -> Future[StepResult] | QueuedResult[StepResult]:
        """Queue the sampling of the step whose `forward` was queued last, and the copies of its result."""
        forward, self._forward = self._forward, None
        assert forward is not None, "sample without forward"
        if self._failure is not None:
            return _failed(self._failure)
        try:
            with self._launch("launch_sample", waits=grammars is not None) as launch:
                self.queue.hold_for_fetches()  # it writes what the copies of the step before read
                output = self._runner.sample(inputs, num_drafting, grammars)
                tensors = output.tensors()
            copies, mark = self.queue.fetch(list(tensors.values()))
        except Exception as error:
            return _failed(error)
        named = dict(zip(tensors, copies, strict=True))

        def make() -> StepResult:
            parts = (part.start.elapsed_time(part.end) for part in (forward, launch))
            return output.result(named, device_ms=sum(parts))

        return QueuedResult(mark, make)

    def run(self, work: Callable[..., Any], *args: Any) -> Future[Any]:
        """Do other work on the device's pools, behind what is queued; its waits are the caller's."""
        try:
            with self.queue.launching(), self.queue.waiting():
                self._runner.settle()
                return _done(work(*args))
        except Exception as error:
            return _failed(error)

    def run_beside(self, work: Callable[..., Any], *args: Any) -> Future[Any]:
        """Do other work likewise, which leaves the pools alone."""
        try:
            return _done(work(*args))
        except Exception as error:
            return _failed(error)

    @property
    def busy_seconds(self) -> float:
        """Time the device worked, of what has ended."""
        self._collect()
        return self._busy_seconds

    @property
    def idle_seconds(self) -> float:
        """Time it waited for the host between two launches of one run."""
        self._collect()
        return self._idle_seconds

    def pause(self) -> None:
        """The host has nothing to launch: the time until the next launch is no one's idle time."""
        self._last_end = None

    def drain(self) -> None:
        """Wait until everything queued has run, whatever its outcome."""
        self.queue.drain()
        self._forward = self._failure = self._last_end = None

    def close(self) -> None:
        """Finish what is queued."""
        self.queue.drain()

    @contextlib.contextmanager
    def _launch(self, section: str, waits: bool) -> Iterator[_Launch]:
        launch = _Launch(self._last_end, self.queue.mark(), self.queue.mark())
        with self.host_timers.timed(section), self.queue.launching():
            launch.start.record()
            try:
                with self.queue.waiting() if waits else contextlib.nullcontext():
                    yield launch
            finally:
                launch.end.record()
                self._last_end = launch.end
                self._open.append(launch)
        if len(self._open) > 64:
            self._collect()

    def _collect(self) -> None:
        while self._open and self._open[0].end.query():
            launch = self._open.popleft()
            self._busy_seconds += 1e-3 * launch.start.elapsed_time(launch.end)
            if launch.before is not None:
                self._idle_seconds += 1e-3 * max(0.0, launch.before.elapsed_time(launch.start))


def _done(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future


def _failed(error: Exception) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_exception(error)
    return future
