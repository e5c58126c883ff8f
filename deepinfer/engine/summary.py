"""Summary: everything the engine counted, as one plain value that prints as tables."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from deepinfer.outputs import RequestMetrics
from deepinfer.sampling.calibration import ReliabilityBin

if TYPE_CHECKING:
    from deepinfer.engine.executor import Executor
    from deepinfer.engine.stats import EngineStats
    from deepinfer.engine.stream_executor import StreamExecutor
    from deepinfer.engine.swap import HostSwap
    from deepinfer.runtime.model_runner import ModelRunner
    from deepinfer.structured_output.step import GrammarThread

NEWEST_REQUESTS = 4096  # whose times a summary speaks of
HOST_SECTIONS = (
    "store",
    "transfer",
    "swap",
    "grammar",
    "schedule",
    "build",
    "launch_forward",
    "launch_sample",
    "commit",
    "text",
)
DEVICE_SECTIONS = ("forward", "sample", "draft")


@dataclass(frozen=True)
class Quantiles:
    """A time over the newest requests that have one, milliseconds; NaN where none has."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Quantiles:
        """Summarise the values that are not None."""
        known = [value for value in values if value is not None]
        if not known:
            return cls(0, *(float("nan"),) * 4)
        return cls(len(known), float(np.mean(known)), *np.quantile(known, (0.5, 0.9, 0.99)).tolist())


class RequestTimes:
    """Times of the newest finished requests."""

    def __init__(self) -> None:
        self._newest: deque[tuple[float | None, float | None, float | None]] = deque(maxlen=NEWEST_REQUESTS)

    def add(self, metrics: RequestMetrics) -> None:
        """Keep what a summary needs of a finished request."""
        self._newest.append((metrics.queue_ms, metrics.ttft_ms, metrics.tpot_ms))

    def quantiles(self) -> tuple[Quantiles, Quantiles, Quantiles]:
        """Queue time, time to first token, time per output token."""
        queue, ttft, tpot = zip(*self._newest) if self._newest else ((), (), ())
        return Quantiles.of(queue), Quantiles.of(ttft), Quantiles.of(tpot)


@dataclass(frozen=True)
class StatsSummary:
    """What an engine did since it started. `str()` of it is a report.

    Attributes:
        num_steps, num_prefill_steps: committed steps.
        num_overlapped_steps: of these, planned while the device ran the step before.
        num_prefill_tokens, num_output_tokens, num_finished_sequences, num_preemptions: totals.
        num_recomputed_rows: prefilled rows of tokens that had been computed before, until a preemption or a
            step that failed.
        num_swapped_out, num_swapped_in: preempted sequences that went to host memory, and came back, with
            swapped_out_bytes and swapped_in_bytes.
        num_cached_tokens: tokens of admitted sequences that were found in the prefix cache or with an equal
            prompt beside them, instead of computed; num_prefix_hits, num_forks: sequences of either kind.
        num_passed_borders: states that the prefix cache has kept of decoding sequences.
        num_drafted, num_verified, num_accepted: draft tokens.
        verified_by_position, accepted_by_position: of these at each place in the block of drafts.
        tokens_per_step: mean output tokens of a request in a decode step; 0 before the first.
        host_seconds: the host's time by section: schedule, build, commit, text, and `wait` for the device.
        device_seconds: the device's time by section: forward, sample, draft. On a CPU, of the thread that
            stands for the device.
        device_busy_seconds: the device's time in all, with what stands between these sections.
        device_idle_seconds: of the time between two launches of a run, what the device waited for the host.
        num_graph_steps, num_eager_steps: launched steps whose forward was replayed from a graph, and others.
        num_structured_steps: steps with rows that follow a grammar.
        grammar_seconds: time that matching and masks took; grammar_wait_seconds: for which the device waited,
            the rest was hidden under its work.
        queue_ms, ttft_ms, tpot_ms: of the newest `NEWEST_REQUESTS` finished requests.
        reliability: per position, the drafter's estimates against what came true.
    """

    num_steps: int
    num_prefill_steps: int
    num_overlapped_steps: int
    num_prefill_tokens: int
    num_output_tokens: int
    num_finished_sequences: int
    num_preemptions: int
    num_recomputed_rows: int
    num_swapped_out: int
    num_swapped_in: int
    swapped_out_bytes: int
    swapped_in_bytes: int
    num_cached_tokens: int
    num_prefix_hits: int
    num_forks: int
    num_passed_borders: int
    num_drafted: int
    num_verified: int
    num_accepted: int
    verified_by_position: tuple[int, ...]
    accepted_by_position: tuple[int, ...]
    tokens_per_step: float
    host_seconds: Mapping[str, float]
    device_seconds: Mapping[str, float]
    device_busy_seconds: float
    device_idle_seconds: float
    num_graph_steps: int
    num_eager_steps: int
    num_structured_steps: int
    grammar_seconds: float
    grammar_wait_seconds: float
    queue_ms: Quantiles
    ttft_ms: Quantiles
    tpot_ms: Quantiles
    reliability: tuple[tuple[ReliabilityBin, ...], ...]

    @classmethod
    def of(
        cls,
        stats: EngineStats,
        core: Any,
        *,
        runner: ModelRunner,
        executor: Executor | StreamExecutor,
        swap: HostSwap | None,
        grammars: GrammarThread,
        reliability: list[list[ReliabilityBin]],
    ) -> StatsSummary:
        """What the parts of an engine have counted so far."""
        queue_ms, ttft_ms, tpot_ms = stats.request_times.quantiles()
        prefixes, swaps = core.prefix_cache_stats(), core.swap_stats()
        return cls(
            num_steps=stats.num_steps,
            num_prefill_steps=stats.num_prefill_steps,
            num_overlapped_steps=stats.num_overlapped_steps,
            num_prefill_tokens=stats.num_prefill_tokens,
            num_output_tokens=stats.num_output_tokens,
            num_finished_sequences=stats.num_finished,
            num_preemptions=stats.num_preemptions,
            num_recomputed_rows=core.num_recomputed_rows,
            num_swapped_out=swaps.num_out,
            num_swapped_in=swaps.num_in,
            swapped_out_bytes=0 if swap is None else swap.out_bytes,
            swapped_in_bytes=0 if swap is None else swap.in_bytes,
            num_cached_tokens=prefixes.num_hit_tokens,
            num_prefix_hits=prefixes.num_hits,
            num_forks=prefixes.num_forks,
            num_passed_borders=prefixes.num_passed,
            num_drafted=stats.num_drafted,
            num_verified=int(stats.verified_by_position.sum()),
            num_accepted=int(stats.accepted_by_position.sum()),
            verified_by_position=tuple(stats.verified_by_position.tolist()),
            accepted_by_position=tuple(stats.accepted_by_position.tolist()),
            tokens_per_step=stats.tokens_per_step,
            host_seconds={**stats.timers.seconds, **executor.host_timers.seconds},
            device_seconds=dict(runner.timers.seconds),
            device_busy_seconds=executor.busy_seconds,
            device_idle_seconds=executor.idle_seconds,
            num_graph_steps=runner.num_graph_steps,
            num_eager_steps=runner.num_eager_steps,
            num_structured_steps=grammars.num_steps,
            grammar_seconds=grammars.seconds,
            grammar_wait_seconds=grammars.wait_seconds,
            queue_ms=queue_ms,
            ttft_ms=ttft_ms,
            tpot_ms=tpot_ms,
            reliability=tuple(map(tuple, reliability)),
        )

    @property
    def host_work_seconds(self) -> float:
        """The host's time without waiting."""
        return sum(self.host_seconds.get(section, 0.0) for section in HOST_SECTIONS)

    @property
    def hidden_host_seconds(self) -> float:
        """Host work that cost no time, because the device computed meanwhile; 0 without overlap."""
        if self.num_overlapped_steps == 0:
            return 0.0
        return max(0.0, self.host_work_seconds - self.device_idle_seconds)

    def __str__(self) -> str:
        lines = [
            f"steps                {self.num_steps} ({self.num_prefill_steps} prefill, "
            f"{self.num_overlapped_steps} planned under the step before)",
            f"tokens               {self.num_prefill_tokens} prefilled, {self.num_output_tokens} generated, "
            f"{self.tokens_per_step:.2f} per decode step of a request",
            f"sequences            {self.num_finished_sequences} finished, "
            f"{self.num_preemptions} preemptions",
            f"preempted            {self.num_swapped_out} swapped out ({self.swapped_out_bytes} bytes), "
            f"{self.num_swapped_in} in ({self.swapped_in_bytes} bytes), "
            f"{self.num_recomputed_rows} rows recomputed",
            f"prefixes             {self.num_cached_tokens} tokens found, {self.num_prefix_hits} hits, "
            f"{self.num_forks} forks, {self.num_passed_borders} states kept while decoding",
        ]
        for name, times in (("queue", self.queue_ms), ("TTFT", self.ttft_ms), ("TPOT", self.tpot_ms)):
            lines.append(
                f"{name + ' ms':20} mean {times.mean:.2f}, p50 {times.p50:.2f}, p90 {times.p90:.2f}, "
                f"p99 {times.p99:.2f} ({times.count} requests)"
            )
        sections = (*HOST_SECTIONS, "wait")
        lines.append("host s               " + _sections(self.host_seconds, sections))
        lines.append(
            "device s             " + _sections(self.device_seconds, DEVICE_SECTIONS) + f", in all "
            f"{self.device_busy_seconds:.3f}, waiting for the host {self.device_idle_seconds:.3f}"
        )
        lines.append(
            f"host work hidden     {self.hidden_host_seconds:.3f} of {self.host_work_seconds:.3f} seconds"
        )
        if self.num_structured_steps:
            lines.append(
                f"grammars             {self.num_structured_steps} steps, masks {self.grammar_seconds:.3f} "
                f"seconds, {self.grammar_wait_seconds:.3f} of them waited for"
            )
        if self.verified_by_position:
            lines.append(
                f"drafts               {self.num_drafted} proposed, {self.num_verified} verified, "
                f"{self.num_accepted} accepted"
            )
            lines.append("draft        verified   accepted   share   estimated   stood   blocks")
            for place, verified in enumerate(self.verified_by_position):
                accepted, bins = self.accepted_by_position[place], self.reliability[place]
                count = sum(each.count for each in bins)
                estimated, stood = (
                    sum(each.count * getattr(each, name) for each in bins) / max(count, 1)
                    for name in ("mean_score", "mean_label")
                )
                lines.append(
                    f"{place + 1:5}     {verified:11}{accepted:11}{accepted / max(verified, 1):8.3f}"
                    f"{estimated:12.3f}{stood:8.3f}{count:9}"
                )
        return "\n".join(lines)


def _sections(seconds: Mapping[str, float], names: Iterable[str]) -> str:
    return ", ".join(f"{name} {seconds.get(name, 0.0):.3f}" for name in names)
