"""Executor: the device's work as a queue, so that the host can plan the next step meanwhile.

On a GPU launches are asynchronous by nature. On a CPU the model would block the host, so it runs in a thread
of its own that takes launches in order, like a stream; torch releases the interpreter while it computes.
"""

from __future__ import annotations

import dataclasses
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from deepinfer.models.base import LayerGate
from deepinfer.runtime.async_batch import Remap
from deepinfer.runtime.batch import Batch, CacheCopies
from deepinfer.runtime.model_runner import ModelRunner
from deepinfer.runtime.step_output import StepResult
from deepinfer.sampling.inputs import SamplingInputs
from deepinfer.structured_output.step import StepGrammars
from deepinfer.utils.timer import Timers


class Executor:
    """Runs a ModelRunner's launches in order.

    Args:
        runner: the device's work.
        use_thread: launch into a thread (asynchronous scheduling); False runs each launch at once.

    Attributes:
        busy_seconds: time the device worked.
        idle_seconds: time it waited for the host between two launches that were both pending work of one run.
        host_timers: time of launches; none, they are the device's work here.
    """

    def __init__(self, runner: ModelRunner, use_thread: bool) -> None:
        self._runner = runner
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="deepinfer-device") if use_thread else None
        if self._pool is not None:
            # Its thread ends with the pool, and a launch that still comes would wait for ever: the finalizer
            # keeps the pool until an engine that nobody closed is really gone.
            weakref.finalize(self, self._pool.shutdown, wait=False)
        self._forward: Future[None] | None = None
        self._last_end: float | None = None
        self._step_start = 0.0  # `busy_seconds` when the newest step began
        self.busy_seconds = 0.0
        self.idle_seconds = 0.0
        self.host_timers = Timers()

    def forward(
        self,
        batch: Batch,
        remap: Remap | None,
        copies: CacheCopies | None = None,
        gate: LayerGate | None = None,
    ) -> Future[np.ndarray | None]:
        """Queue a step's backbone; a fault shows in the result of the `sample` that follows.

        Args:
            batch, remap, copies: `ModelRunner.prepare`'s.
            gate: what is on its way into the caches; None for nothing.

        Returns:
            [S] int32 rows of each sequence where the device deals them anew, else None.
        """

        def prepare() -> np.ndarray | None:
            self._step_start = self.busy_seconds
            seqlens_q = self._runner.prepare(batch, remap, copies)
            return None if seqlens_q is None else seqlens_q.cpu().numpy()

        prepared = self._launch(prepare)

        def run() -> None:
            prepared.result()  # raises what it raised; it ran before in the same queue
            self._runner.forward(gate)

        self._forward = self._launch(run)
        return prepared

    def sample(
        self, inputs: SamplingInputs, num_drafting: int, grammars: StepGrammars | None = None
    ) -> Future[StepResult]:
        """Queue the sampling of the step whose `forward` was queued last."""
        forward, self._forward = self._forward, None
        assert forward is not None, "sample without forward"

        def run() -> StepResult:
            forward.result()
            start = time.perf_counter()
            result = self._runner.sample(inputs, num_drafting, grammars).fetch()
            seconds = self.busy_seconds - self._step_start + time.perf_counter() - start
            return dataclasses.replace(result, device_ms=1e3 * seconds)

        return self._launch(run)

    def run(self, work: Callable[..., Any], *args: Any) -> Future[Any]:
        """Queue other work on the device's pools, in order with the steps around it."""

        def run() -> Any:
            self._runner.settle()
            return work(*args)

        return self._launch(run)

    def run_beside(self, work: Callable[..., Any], *args: Any) -> Future[Any]:
        """Queue other work likewise, which leaves the pools alone."""
        return self._launch(work, *args)

    def pause(self) -> None:
        """The host has nothing to launch: the time until the next launch is no one's idle time."""
        self._last_end = None

    def drain(self) -> None:
        """Wait until everything queued has run, whatever its outcome."""
        if self._pool is not None:
            self._pool.submit(lambda: None).result()
        self._forward = None
        self._last_end = None

    def close(self) -> None:
        """Finish what is queued and end the thread."""
        if self._pool is not None:
            self._pool.shutdown()

    def _launch(self, work: Callable[..., Any], *args: Any) -> Future[Any]:
        if self._pool is not None:
            return self._pool.submit(self._timed, work, *args)
        done: Future[Any] = Future()
        try:
            done.set_result(self._timed(work, *args))
        except Exception as error:
            done.set_exception(error)
        return done

    def _timed(self, work: Callable[..., Any], *args: Any) -> Any:
        start = time.perf_counter()
        if self._last_end is not None:
            self.idle_seconds += start - self._last_end
        try:
            return work(*args)
        finally:
            self._last_end = time.perf_counter()
            self.busy_seconds += self._last_end - start


class WatchedWork:
    """Queued work whose result nobody waits for: `check` says what has failed.

    A step that has run proves that what was queued in front of it has run as well, so `check` belongs between
    a step's result and its commit.
    """

    def __init__(self) -> None:
        self._queued: list[Future[Any]] = []

    def add(self, work: Future[Any]) -> None:
        """Watch what `Executor.run` has returned."""
        self._queued.append(work)

    def check(self) -> None:
        """Forget what has run; raises what the first of it has raised."""
        queued, self._queued = self._queued, []
        # Looked at once: it may be done a moment later.
        states = [(work, work.done()) for work in queued]
        self._queued += [work for work, is_done in states if not is_done]
        for work, is_done in states:
            if is_done:
                work.result()

    def clear(self) -> None:
        """Forget everything."""
        self._queued.clear()
