"""Prefill: the rate of steps that compute a given number of prompt tokens behind a cached context.

request    | context_length - uncached: found in the prefix cache | uncached: computed |
step       prefill_batch_size tokens, of prefill_batch_size / uncached requests, or a chunk of one
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from deepinfer import LLM, SamplingParams, Settings
from examples.bench import emulated
from examples.bench.arithmetic import prefill_figures, quantiles, without_flushes
from examples.bench.components import StepShape
from examples.bench.engines import HostTimes, Stepper, check_token_counts, opened, pretended
from examples.bench.prompts import drawn
from examples.bench.setting import Setting

BLOCK = 128
NUM_ALONE = 5  # requests that come alone, whose time to the first token is taken


def measure_prefill(setting: Setting, settings: Settings) -> dict[str, Any]:
    """Run one setting; figures as in `arithmetic.prefill_figures`, and times in milliseconds.

    Raises:
        ValueError: context, uncached tokens and the size of a step do not fit together.
    """
    context, uncached, batch = _lengths(setting)
    cached = context - uncached
    at_once = max(1, batch // uncached)  # requests of a step
    chunks = max(1, uncached // batch)  # steps of a request
    num_requests = at_once * (-(-(setting.warmup + setting.steps + 3) // chunks))
    blocks_per_request = -(-(context + 1) // BLOCK)
    own_blocks = -(-uncached // BLOCK) + 1  # of a request, beyond those of its prefix
    # Those of the step in flight and of the next; a prompt is cut where the cache keeps a state of it.
    max_num_seqs = 4 * at_once
    with opened(
        setting,
        dataclasses.replace(settings, enforce_eager=True),  # graphs are for decode steps, and there is none
        max_num_seqs=max_num_seqs,
        max_model_len=context + 2,
        max_num_batched_tokens=max(batch, max_num_seqs * (1 + setting.num_drafts)),
        num_blocks=at_once * blocks_per_request + (max_num_seqs + at_once) * own_blocks + 2,
        num_prefix_states=4 * at_once,
    ) as (llm, stepper):
        banned = (*llm.get_tokenizer().internal_ids, llm.get_tokenizer().eos_token_id)
        vocab_size = llm.llm_engine.vocab_size
        prefixes = drawn(at_once, cached + 1, vocab_size, banned, setting.seed)
        tails = drawn(num_requests + NUM_ALONE, uncached, vocab_size, banned, setting.seed + 1)
        if cached:
            with pretended(llm):
                for row in range(at_once):
                    stepper.submit(f"prefix {row}", prefixes[row], _one_token(row))
                stepper.finish()
        for row in range(num_requests):
            prompt = np.concatenate([prefixes[row % at_once, :cached], tails[row]])
            stepper.submit(str(row), prompt, _one_token(row))
        intervals = _measure(llm, stepper, setting, batch)
        stepper.finish()
        rows = min(uncached, batch)
        kept_rows = min(setting.keep_tokens, rows) if setting.yoco_clip else rows
        emulation = emulated.report(llm, setting, StepShape(at_once, rows, kept_rows, 1, context, 0))
        alone = _alone(stepper, prefixes[0, :cached], tails[num_requests:])
        num_tokens = check_token_counts(stepper.outputs, llm.llm_engine.stats.num_output_tokens)
    kept = without_flushes(intervals.values, stepper.flush_every)
    return {
        **prefill_figures(kept, batch, setting.num_devices),
        "cached_tokens_per_request": cached,
        "requests_per_step": at_once,
        **quantiles("step_ms", (each.ms for each in kept)),
        "num_steps": len(kept),
        "num_dropped_steps": len(intervals.values) - len(kept),
        **quantiles("ttft_ms", alone),
        "host_ms_per_step": intervals.host_ms,
        "num_output_tokens": num_tokens,
        **emulation,
    }


class _Measured:
    def __init__(self, values: list[Any], host_ms: float) -> None:
        self.values = values
        self.host_ms = host_ms


def _measure(llm: LLM, stepper: Stepper, setting: Setting, batch: int) -> _Measured:
    """Intervals of whole steps, behind the warm-up."""
    stepper.run_until(lambda interval: interval.num_prefill_tokens == batch)
    for _ in range(setting.warmup - 2):
        stepper.step()
    host = HostTimes.of(llm)
    values = [stepper.step() for _ in range(setting.steps + 1)]  # the first one read the counters
    return _Measured(values[1:], 1e3 * (HostTimes.of(llm).work - host.work) / len(values))


def _alone(stepper: Stepper, prefix: np.ndarray, tails: np.ndarray) -> list[float | None]:
    """Time to the first token of requests that come one at a time."""
    times = []
    for row, tail in enumerate(tails):
        stepper.submit(f"alone {row}", np.concatenate([prefix, tail]), _one_token(row))
        stepper.finish()
        times.append(stepper.outputs[-1].metrics.ttft_ms)
    return times


def _lengths(setting: Setting) -> tuple[int, int, int]:
    """Context, uncached tokens, tokens of a step."""
    batch = setting.prefill_batch_size
    context = setting.context_length or batch
    uncached = min(setting.uncached or context, context)
    if (context - uncached) % BLOCK:
        raise ValueError(
            f"--context_length {context} - --uncached {uncached} is no multiple of {BLOCK}, the tokens of a "
            "cache block, so it cannot be found in the prefix cache"
        )
    if max(batch, uncached) % min(batch, uncached):
        raise ValueError(
            f"--prefill_batch_size {batch} and --uncached {uncached}: one has to be a multiple of the other"
        )
    return context, uncached, batch


def _one_token(seed: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, seed=seed, max_tokens=1, ignore_eos=True, detokenize=False)
