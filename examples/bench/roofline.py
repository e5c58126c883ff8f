"""Roofline: for each component of a step its bytes, work, least time, measured time and the gap between."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

from deepinfer import LLM, Settings
from deepinfer.models.deepseek_v41.rank_share import RankShare
from examples.bench import emulated, prefill
from examples.bench.components import StepShape, Work, step_work
from examples.bench.decode import PROMPT_ROOM, decode_arguments, start
from examples.bench.engines import Stepper, opened
from examples.bench.profiling import OTHER, profile_steps
from examples.bench.setting import Setting

NUM_STEPS, NUM_PREFILL_STEPS = 4, 2  # that are profiled
WARMUP = 4  # steps before
NUM_KERNELS = 40  # that are listed


def rows_of(
    config: Any, share: RankShare, shape: StepShape, measured: dict[str, float]
) -> list[dict[str, Any]]:
    """One object for each component, the longest first, and their sum; times in milliseconds."""
    work = step_work(config, shape, share.resident_of)
    names = sorted({*work, *measured}, key=lambda name: -measured.get(name, 0.0))
    rows = [_row(name, work.get(name, Work(0, 0)), measured.get(name, 0.0)) for name in names]
    total = _row("together", sum(work.values(), Work(0, 0)), sum(measured.values()))
    total["floor_ms"] = sum(row["floor_ms"] for row in rows)
    total["gap_ms"] = total["measured_ms"] - total["floor_ms"]
    return [*rows, total]


def _row(name: str, work: Work, measured: float) -> dict[str, Any]:
    floor = work.floor_ms()
    return {
        "component": name,
        "mbytes": work.bytes / 1e6,
        "gflop": work.flops / 1e9,
        "floor_ms": floor,
        "measured_ms": measured,
        "gap_ms": measured - floor,
    }


def table(rows: list[dict[str, Any]]) -> str:
    """The rows in Markdown."""
    lines = [
        "| component | MB | GFLOP | floor ms | measured ms | gap ms | of the floor |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        share = f"{row['measured_ms'] / row['floor_ms']:.1f}x" if row["floor_ms"] > 1e-6 else ""
        lines.append(
            f"| {row['component']} | {row['mbytes']:,.1f} | {row['gflop']:,.1f} | {row['floor_ms']:.3f} "
            f"| {row['measured_ms']:.3f} | {row['gap_ms']:.3f} | {share} |"
        )
    return "\n".join(lines)


def text(found: dict[str, Any]) -> str:
    """What `measure_roofline` returns, for people."""
    parts = [table(found["rows"])]
    parts.append(
        f"cache records read, as the engine counts them: {found['cache_bytes_read'] / 1e6:,.1f} MB a step"
    )
    if found.get("emulated"):
        parts.append(emulated.text(found))
    if found["kernels"]:
        lines = ["| kernel | launches | ms |", "|---|---|---|"]
        lines += [f"| {name[:90]} | {count:.1f} | {ms:.4f} |" for name, count, ms in found["kernels"]]
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def measure_roofline(setting: Setting, settings: Settings) -> dict[str, Any]:
    """Profile eager steps of a decode or prefill setting.

    Returns:
        rows: of `rows_of`; kernels: (name, launches of a step, ms); cache_bytes_read: of cache records, in a
        step; emulated, skipped: of `emulated.report`.
    """
    is_prefill = setting.phase == "prefill"
    num_steps = NUM_PREFILL_STEPS if is_prefill else NUM_STEPS
    setting = dataclasses.replace(setting, warmup=WARMUP, steps=num_steps)
    with (_prefilling if is_prefill else _decoding)(setting, settings) as (llm, stepper, shape):
        for _ in range(setting.warmup):
            stepper.step()
        counters = llm.llm_engine.cache_counters
        before = counters.bytes_read
        profile = profile_steps(stepper.step, num_steps)
        read = (counters.bytes_read - before) / num_steps
        return {
            "rows": rows_of(llm.llm_engine.model_config, setting.rank_share, shape, profile.components),
            "kernels": profile.kernels[:NUM_KERNELS],
            "other_ms": profile.components.get(OTHER, 0.0),
            "cache_bytes_read": read,
            **emulated.report(llm, setting, shape, profile.components.get("routed experts", 0.0)),
        }


@contextlib.contextmanager
def _decoding(setting: Setting, settings: Settings) -> Iterator[tuple[LLM, Stepper, StepShape]]:
    """All requests decode."""
    settings = dataclasses.replace(settings, enforce_eager=True)  # replays do not say who launched a kernel
    with opened(setting, settings, **decode_arguments(setting)) as (llm, stepper):
        start(llm, stepper, setting)
        rows = 1 + setting.num_drafts
        # Begun requests have computed no prompt.
        prompts = int(stepper.engine.stats.num_prefill_tokens / setting.num_requests)
        context = (prompts or setting.context_length or PROMPT_ROOM) + rows
        yield llm, stepper, StepShape(setting.num_requests, rows, rows, rows, context, setting.num_drafts)


@contextlib.contextmanager
def _prefilling(setting: Setting, settings: Settings) -> Iterator[tuple[LLM, Stepper, StepShape]]:
    """Whole prefill steps run."""
    lengths = prefill.Lengths.of(setting)
    with prefill.submitted(setting, settings) as (llm, stepper, _):
        stepper.run_until(lambda interval: interval.num_prefill_tokens == lengths.batch)
        yield llm, stepper, lengths.shape(setting)
