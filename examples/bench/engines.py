"""Engines for the benchmark: made from a setting, stepped with a clock, their counters read in between."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from deepinfer import LLM, RequestOutput, SamplingParams, Settings
from examples.bench.arithmetic import Interval
from examples.bench.setting import Setting


@dataclass(frozen=True)
class HostTimes:
    """Seconds since the engine started: the host's work without waiting, the device's work and its gaps."""

    work: float
    busy: float
    idle: float

    @classmethod
    def of(cls, llm: LLM) -> HostTimes:
        """Read an engine's."""
        summary = llm.get_stats()
        return cls(summary.host_work_seconds, summary.device_busy_seconds, summary.device_idle_seconds)


class Stepper:
    """Steps an engine; keeps what it hands out and the interval of every step.

    Attributes:
        outputs: results of requests that have ended.
        flush_every: steps between two statistics lines.
    """

    def __init__(self, llm: LLM, settings: Settings) -> None:
        self.engine = llm.llm_engine
        self.outputs: list[RequestOutput] = []
        self.flush_every = settings.logging_interval_steps
        self._before = self._counts()
        self._clock = time.perf_counter()

    def step(self) -> Interval:
        """Step until something is committed; the time since that was so before."""
        while True:
            self.outputs += [output for output in self.engine.step() if output.finished]
            if self.engine.stats.num_steps > self._before[0] or not self.engine.has_unfinished_requests():
                break
        now, counts = time.perf_counter(), self._counts()
        before, self._before = self._before, counts
        start, self._clock = self._clock, now
        added = [new - old for new, old in zip(counts, before)]
        return Interval(1e3 * (now - start), before[0], counts[0], *added[1:])

    def run_until(self, is_done: Callable[[Interval], bool]) -> Interval:
        """Step until an interval is what was waited for.

        Raises:
            RuntimeError: no request is left before.
        """
        while self.engine.has_unfinished_requests():
            interval = self.step()
            if is_done(interval):
                return interval
        raise RuntimeError("the requests ended before the measurement began: " + self._ends())

    def finish(self) -> None:
        """Step until every request has ended."""
        while self.engine.has_unfinished_requests():
            self.step()
        self.engine.settle()

    def submit(self, name: str, tokens: np.ndarray, params: SamplingParams) -> None:
        """Queue a request."""
        self.engine.add_request(name, {"prompt_token_ids": tokens}, params)

    def _counts(self) -> tuple[int, int, int, int]:
        stats = self.engine.stats
        return (
            stats.num_steps,
            stats.num_request_steps,
            stats.num_decode_tokens,
            stats.num_prefill_tokens,
        )

    def _ends(self) -> str:
        ends = [str(output.outputs[0].error or output.outputs[0].finish_reason) for output in self.outputs]
        return "; ".join(sorted(set(ends))) or "no request was there"


@contextlib.contextmanager
def opened(setting: Setting, settings: Settings, **args: Any) -> Iterator[tuple[LLM, Stepper]]:
    """An engine of a setting, closed behind; a GPU's memory is free of what ran before."""
    gc.collect()
    _trim()
    settings = setting.engine_settings(settings)
    with LLM(settings=settings, **setting.engine_args(disable_log_stats=False, **args)) as llm:
        _trim()  # of what only loading needed
        yield llm, Stepper(llm, settings)


def _trim() -> None:
    """Give back what torch holds of a GPU for nothing, and begin a new peak."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def pretended(llm: LLM) -> contextlib.AbstractContextManager[None]:
    """In it prefills of a dummy compute nothing: its caches are full of random records from the start."""
    emulation = llm.llm_engine.emulation
    return contextlib.nullcontext() if emulation is None else emulation.pretended_prefill()


def peak_gib() -> float | None:
    """Memory of the GPU that torch has held at most since `opened`, in GiB; None on a CPU."""
    return torch.cuda.max_memory_reserved() / 2**30 if torch.cuda.is_available() else None


def check_token_counts(outputs: list[RequestOutput], counted: int) -> int:
    """The output tokens of all results.

    Raises:
        RuntimeError: the engine has counted another number, or a request failed.
    """
    failed = [output.outputs[0].error for output in outputs if output.outputs[0].error is not None]
    if failed:
        raise RuntimeError(f"{len(failed)} requests failed: {failed[0]}")
    total = sum(len(sample.token_ids) for output in outputs for sample in output.outputs)
    if total != counted:
        raise RuntimeError(f"the results hold {total} output tokens, the engine has counted {counted}")
    return total
