"""Statistics: counters of steps and the periodic log line."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from deepinfer.utils.logging import get_logger
from deepinfer.utils.timer import Timers

logger = get_logger(__name__)


@dataclass
class EngineStats:
    """Totals since the engine started; plain numbers, read at any time.

    `timers` holds the host's time by section of a step: schedule, build, forward, sample, commit, text.
    """

    num_steps: int = 0
    num_prefill_steps: int = 0
    num_prefill_tokens: int = 0
    num_output_tokens: int = 0
    num_finished: int = 0
    num_preemptions: int = 0
    timers: Timers = field(default_factory=Timers)

    def add_step(self, plan: Any, num_new_tokens: int, num_finished: int) -> None:
        """Count a committed step."""
        self.num_steps += 1
        self.num_prefill_steps += plan.is_prefill
        self.num_prefill_tokens += plan.num_prefill_tokens
        self.num_output_tokens += num_new_tokens
        self.num_finished += num_finished
        self.num_preemptions += len(plan.preempted_ids)


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
            "free blocks %d, finished %d, preempted %d",
            steps / seconds,
            100 * prefills // max(steps, 1),
            prompt / seconds,
            output / seconds,
            plan.num_running,
            plan.num_waiting,
            plan.num_free_blocks,
            finished,
            preempted,
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
