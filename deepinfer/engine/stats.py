"""Statistics: counters of steps and the periodic log line."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from deepinfer.engine.summary import RequestTimes
from deepinfer.outputs import RequestOutput
from deepinfer.sampling.calibration import ReliabilityBin
from deepinfer.utils.logging import get_logger
from deepinfer.utils.timer import Timers

logger = get_logger(__name__)


class EngineStats:
    """Totals since the engine started; plain numbers, read at any time.

    Args:
        num_draft_tokens: most drafts per request and step.

    Attributes:
        num_drafted: drafts proposed.
        verified_by_position, accepted_by_position: verified and accepted drafts of each place in the block.
        num_request_steps: decode steps summed over the requests that took part.
        num_overlapped_steps: steps that were planned while the device ran the one before.
        timers: host time by section of a step: schedule, build, wait, commit, text.
        request_times: queue time, TTFT and TPOT of finished requests.
    """

    def __init__(self, num_draft_tokens: int = 0) -> None:
        self.num_steps = 0
        self.num_prefill_steps = 0
        self.num_overlapped_steps = 0
        self.num_request_steps = 0
        self.num_prefill_tokens = 0
        self.num_output_tokens = 0
        self.num_finished = 0
        self.num_preemptions = 0
        self.num_decode_tokens = 0
        self.num_drafted = 0
        self.verified_by_position = np.zeros(num_draft_tokens, dtype=np.int64)
        self.accepted_by_position = np.zeros(num_draft_tokens, dtype=np.int64)
        self.timers = Timers()
        self.request_times = RequestTimes()

    @property
    def tokens_per_step(self) -> float:
        """Mean output tokens of a request in a decode step; 0 before the first."""
        return self.num_decode_tokens / self.num_request_steps if self.num_request_steps else 0.0

    def add_step(self, plan: Any, commit: Any) -> None:
        """Count a committed step."""
        self.num_steps += 1
        self.num_prefill_steps += plan.is_prefill
        self.num_prefill_tokens += plan.num_prefill_tokens
        self.num_output_tokens += commit.num_tokens
        self.num_finished += len(commit.finished_ids)
        self.num_preemptions += len(plan.preempted_ids)
        self.num_drafted += commit.num_drafted
        if not plan.is_prefill:
            self.num_request_steps += int(np.count_nonzero(commit.num_new_tokens))
            self.num_decode_tokens += commit.num_tokens
            if self.verified_by_position.size:
                self.verified_by_position += commit.verified_by_position
                self.accepted_by_position += commit.accepted_by_position

    def add_results(self, outputs: list[RequestOutput]) -> None:
        """Count what a step hands out."""
        for output in outputs:
            if output.finished:
                self.request_times.add(output.metrics)


def draft_reliability(core: Any) -> list[list[ReliabilityBin]]:
    """The drafter's estimates against what came true, by position.

    Returns:
        For each draft position the 20 bins of the estimated probability that the drafts up to it all stand.
        Of coupled requests every block counts, whatever was verified of it; of ratio requests whole ones.
    """
    tables = []
    for counts, survivals, accepted in zip(*core.reliability()):
        size = len(counts)
        cells = zip(counts.tolist(), survivals.tolist(), accepted.tolist())
        tables.append(
            [
                ReliabilityBin(place / size, (place + 1) / size, n, total / max(n, 1), stood / max(n, 1))
                for place, (n, total, stood) in enumerate(cells)
            ]
        )
    return tables


class StatsLogger:
    """Writes one line every `interval` steps with the rates since the last line; 0 never writes."""

    def __init__(self, stats: EngineStats, interval: int) -> None:
        self._stats = stats
        self._interval = interval
        self._mark = self._read()

    def after_step(self, plan: Any) -> None:
        """Call once per committed step."""
        if self._interval <= 0 or self._stats.num_steps % self._interval:
            return
        now = self._read()
        steps, prefills, prompt, output, finished, preempted, clock = (
            new - old for new, old in zip(now, self._mark, strict=True)
        )
        self._mark = now
        seconds = max(clock, 1e-9)
        logger.info(
            "steps %.1f/s (%d%% prefill), prompt %.1f tok/s, output %.1f tok/s, running %d, waiting %d, "
            "free blocks %d, finished %d, preempted %d, %.2f tokens per decode step",
            steps / seconds,
            100 * prefills // max(steps, 1),
            prompt / seconds,
            output / seconds,
            plan.num_running,
            plan.num_waiting,
            plan.num_free_blocks,
            finished,
            preempted,
            self._stats.tokens_per_step,
        )

    def _read(self) -> tuple[float, ...]:
        s = self._stats
        return (
            s.num_steps,
            s.num_prefill_steps,
            s.num_prefill_tokens,
            s.num_output_tokens,
            s.num_finished,
            s.num_preemptions,
            time.monotonic(),
        )
