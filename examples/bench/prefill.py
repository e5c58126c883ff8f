"""Prefill: the rate of steps that compute a given number of prompt tokens behind a cached context.

request    | context_length - uncached: found in the prefix cache | uncached: computed |
step       prefill_batch_size tokens, of prefill_batch_size / uncached requests, or a chunk of one
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from deepinfer import LLM, SamplingParams, Settings
from examples.bench import emulated
from examples.bench.arithmetic import prefill_figures, quantiles, without_flushes
from examples.bench.components import StepShape
from examples.bench.engines import HostTimes, Stepper, check_token_counts, opened, peak_gib, pretended
from examples.bench.prompts import drawn
from examples.bench.setting import Setting

BLOCK = 128
PREFIX = "prefix"  # of names of requests that fill the cache
NUM_ALONE = 5  # requests that come alone, whose time to the first token is taken


@dataclass(frozen=True)
class Lengths:
    """Tokens of a setting.

    Attributes:
        context: of a prompt.
        uncached: of these, computed.
        batch: of a step.
    """

    context: int
    uncached: int
    batch: int

    @classmethod
    def of(cls, setting: Setting) -> Lengths:
        """A setting's.

        Raises:
            ValueError: they do not fit together.
        """
        batch = setting.prefill_batch_size
        context = setting.context_length or batch
        uncached = min(setting.uncached or context, context)
        if (context - uncached) % BLOCK:
            raise ValueError(
                f"--context_length {context} - --uncached {uncached} is no multiple of {BLOCK}, the tokens "
                "of a cache block, so it cannot be found in the prefix cache"
            )
        if max(batch, uncached) % min(batch, uncached):
            raise ValueError(
                f"--prefill_batch_size {batch} and --uncached {uncached}: one has to be a multiple of the "
                "other"
            )
        return cls(context, uncached, batch)

    @property
    def cached(self) -> int:
        """Prompt tokens that are found in the prefix cache."""
        return self.context - self.uncached

    @property
    def at_once(self) -> int:
        """Requests of a step."""
        return max(1, self.batch // self.uncached)

    @property
    def chunks(self) -> int:
        """Steps of a request."""
        return max(1, self.uncached // self.batch)

    def shape(self, setting: Setting) -> StepShape:
        """A step, as its work is counted; of chunks the last, which has the most."""
        rows = min(self.uncached, self.batch)
        kept_rows = min(setting.keep_tokens, rows) if setting.yoco_clip else rows
        return StepShape(self.at_once, rows, kept_rows, 1, self.context, 0)


def measure_prefill(setting: Setting, settings: Settings) -> dict[str, Any]:
    """Run one setting; figures as in `arithmetic.prefill_figures`, and times in milliseconds.

    Raises:
        ValueError: context, uncached tokens and the size of a step do not fit together.
    """
    lengths = Lengths.of(setting)
    with submitted(setting, settings, NUM_ALONE) as (llm, stepper, alone):
        intervals = _measure(llm, stepper, setting, lengths.batch)
        stepper.finish()
        emulation = emulated.report(llm, setting, lengths.shape(setting))
        times = _alone(stepper, alone)
        _check_found(stepper, lengths)
        num_tokens = check_token_counts(stepper.outputs, llm.llm_engine.stats.num_output_tokens)
    kept = without_flushes(intervals.values, stepper.flush_every)
    return {
        **prefill_figures(kept, lengths.batch, setting.num_devices),
        "cached_tokens_per_request": lengths.cached,
        "requests_per_step": lengths.at_once,
        **quantiles("step_ms", (each.ms for each in kept)),
        "num_steps": len(kept),
        "num_dropped_steps": len(intervals.values) - len(kept),
        **quantiles("ttft_ms", times),
        "host_ms_per_step": intervals.host_ms,
        "device_idle_share": intervals.idle_share,
        "num_output_tokens": num_tokens,
        "peak_gib": peak_gib(),
        **emulation,
    }


@contextlib.contextmanager
def submitted(
    setting: Setting, settings: Settings, num_alone: int = 0
) -> Iterator[tuple[LLM, Stepper, list[np.ndarray]]]:
    """An engine with the requests of a setting queued, whose cached parts are in the prefix cache.

    Args:
        setting, settings: of the engine.
        num_alone: prompts like theirs to draw beside, for requests that come alone.

    Raises:
        ValueError: as `measure_prefill`.
    """
    lengths = Lengths.of(setting)
    cached, at_once = lengths.cached, lengths.at_once
    num_requests = at_once * (-(-(setting.warmup + setting.steps + 3) // lengths.chunks))
    blocks_per_request = -(-(lengths.context + 1) // BLOCK)
    own_blocks = -(-lengths.uncached // BLOCK) + 1  # of a request, beyond those of its prefix
    # Those of the step in flight and of the next; a prompt is cut where the cache keeps a state of it.
    max_num_seqs = 4 * at_once
    with opened(
        setting,
        dataclasses.replace(settings, enforce_eager=True),  # graphs are for decode steps, and there is none
        max_num_seqs=max_num_seqs,
        max_model_len=lengths.context + 2,
        max_num_batched_tokens=max(lengths.batch, max_num_seqs * (1 + setting.num_drafts)),
        num_blocks=at_once * blocks_per_request + (max_num_seqs + at_once) * own_blocks + 2,
        num_prefix_states=max_num_seqs + 2 * at_once,  # prefixes outlive what those in flight leave
        prefix_state_interval=cached,
    ) as (llm, stepper):
        banned = (*llm.get_tokenizer().internal_ids, llm.get_tokenizer().eos_token_id)
        vocab_size = llm.llm_engine.vocab_size
        # As long as the others: with bounded replay only prompts of one length share what they computed.
        prefixes = drawn(at_once, lengths.context, vocab_size, banned, setting.seed)
        tails = drawn(num_requests + num_alone, lengths.uncached, vocab_size, banned, setting.seed + 1)
        if cached:
            with pretended(llm):
                for row in range(at_once):
                    stepper.submit(f"{PREFIX} {row}", prefixes[row], _one_token(row))
                stepper.finish()
        prompts = [
            np.concatenate([prefixes[row % at_once if row < num_requests else 0, :cached], tail])
            for row, tail in enumerate(tails)
        ]
        for row in range(num_requests):
            stepper.submit(str(row), prompts[row], _one_token(row))
        yield llm, stepper, prompts[num_requests:]


class _Measured:
    def __init__(self, values: list[Any], host_ms: float, idle_share: float) -> None:
        self.values = values
        self.host_ms = host_ms
        self.idle_share = idle_share


def _measure(llm: LLM, stepper: Stepper, setting: Setting, batch: int) -> _Measured:
    """Intervals of whole steps, behind the warm-up."""
    stepper.run_until(lambda interval: interval.num_prefill_tokens == batch)
    for _ in range(setting.warmup - 2):
        stepper.step()
    before = HostTimes.of(llm)
    values = [stepper.step() for _ in range(setting.steps + 1)]  # the first one read the counters
    after, seconds = HostTimes.of(llm), sum(each.ms for each in values) / 1e3
    host_ms = 1e3 * (after.work - before.work) / len(values)
    return _Measured(values[1:], host_ms, (after.idle - before.idle) / seconds)


def _check_found(stepper: Stepper, lengths: Lengths) -> None:
    """Raises RuntimeError where a measured prompt was not found in the prefix cache as far as it should."""
    prompts = [output for output in stepper.outputs if not output.request_id.startswith(PREFIX)]
    found = sorted({output.num_cached_tokens for output in prompts})
    if found != [lengths.cached]:
        raise RuntimeError(f"the prefix cache gave prompts {found} tokens instead of {lengths.cached}")


def _alone(stepper: Stepper, prompts: list[np.ndarray]) -> list[float | None]:
    """Time to the first token of requests that come one at a time."""
    times = []
    for row, prompt in enumerate(prompts):
        stepper.submit(f"alone {row}", prompt, _one_token(row))
        stepper.finish()
        times.append(stepper.outputs[-1].metrics.ttft_ms)
    return times


def _one_token(seed: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, seed=seed, max_tokens=1, ignore_eos=True, detokenize=False)
