"""Decode: the rate of steps in which all requests take part, what they accept, and their product."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from deepinfer import LLM, SamplingParams, Settings
from examples.bench import emulated
from examples.bench.arithmetic import assumed_figures, decode_figures, quantiles, without_flushes
from examples.bench.components import StepShape
from examples.bench.engines import HostTimes, Stepper, check_token_counts, opened, peak_gib
from examples.bench.prompts import contexts, drawn, prompt_rows
from examples.bench.setting import Setting

PROMPT_ROOM = 512  # tokens of a prompt that stands alone, at most
BLOCK = 128


def measure_decode(setting: Setting, settings: Settings, assume: float | None = None) -> dict[str, Any]:
    """Run one setting; figures as in `arithmetic.decode_figures`, and times in milliseconds."""
    with opened(setting, settings, **decode_arguments(setting)) as (llm, stepper):
        fill_s = start(llm, stepper, setting)
        for _ in range(setting.warmup - 2):
            stepper.step()
        host, drafts = HostTimes.of(llm), _drafts(llm)
        intervals = [stepper.step() for _ in range(setting.steps + 1)]  # the first one read the counters
        host_after, drafts_after = HostTimes.of(llm), _drafts(llm)
        rows = 1 + setting.num_drafts
        context = llm.llm_engine.scheduler_config.max_model_len
        shape = StepShape(setting.num_requests, rows, rows, rows, context, setting.num_drafts)
        emulation = emulated.report(llm, setting, shape)
        stepper.engine.abort_request([str(row) for row in range(setting.num_requests)])
        stepper.finish()
        given = setting.num_requests if setting.dummy else 0  # first tokens that no step has made
        num_tokens = check_token_counts(stepper.outputs, llm.llm_engine.stats.num_output_tokens + given)
    kept = without_flushes(intervals[1:], stepper.flush_every)
    figures = decode_figures(kept, setting.num_requests, setting.num_devices)
    verified, accepted = (after - before for before, after in zip(drafts, drafts_after))
    seconds = sum(each.ms for each in intervals) / 1e3
    result: dict[str, Any] = {
        **figures,
        "tokens_are_meaningful": not setting.dummy,
        "accepted_by_position": (accepted / np.maximum(verified, 1)).round(4).tolist(),
        **quantiles("step_ms", (each.ms for each in kept)),
        "num_steps": len(kept),
        "num_dropped_steps": setting.steps - len(kept),
        **quantiles("ttft_ms", (None if setting.dummy else o.metrics.ttft_ms for o in stepper.outputs)),
        **quantiles("tpot_ms", (o.metrics.tpot_ms for o in stepper.outputs)),
        "host_ms_per_step": 1e3 * (host_after.work - host.work) / len(intervals),
        "device_idle_share": (host_after.idle - host.idle) / seconds,
        "num_output_tokens": num_tokens,
        "peak_gib": peak_gib(),
        "fill_s": fill_s,
        **emulation,
    }
    if assume is not None and setting.num_drafts:
        result |= assumed_figures(
            figures["request_steps_per_s"],
            setting.num_requests,
            setting.num_devices,
            setting.num_drafts,
            assume,
        )
    return result


def decode_arguments(setting: Setting) -> dict[str, Any]:
    """Keywords of `LLM` that make room for the requests of a setting and for all that they may accept."""
    max_model_len = (setting.context_length or PROMPT_ROOM) + _max_tokens(setting)
    rows = setting.num_requests * (1 + setting.num_drafts)
    return {
        "max_num_seqs": setting.num_requests,
        "max_model_len": max_model_len,
        "max_num_batched_tokens": rows if setting.dummy else max(setting.prefill_batch_size, rows),
        "num_blocks": setting.num_requests * -(-max_model_len // BLOCK) + 1,
        "enable_prefix_caching": False,
    }


def _max_tokens(setting: Setting) -> int:
    """Output tokens for the steps that count and for those between the first prefills and the last."""
    length = setting.context_length or PROMPT_ROOM
    prefills = 0 if setting.dummy else -(-setting.num_requests * length // setting.prefill_batch_size)
    return (prefills + setting.warmup + setting.steps + 6) * (1 + setting.num_drafts) + 1


def start(llm: LLM, stepper: Stepper, setting: Setting) -> float:
    """Submit the requests and step until all of them decode; returns the seconds that this took."""
    clock = time.perf_counter()
    for row, tokens in enumerate(_prompts(llm, setting)):
        params = SamplingParams(
            temperature=setting.temperature,
            seed=setting.seed + row,
            max_tokens=_max_tokens(setting),
            ignore_eos=True,
            detokenize=False,
        )
        if llm.llm_engine.emulation is None:
            stepper.submit(str(row), tokens, params)
        else:
            llm.llm_engine.emulation.add_begun_request(str(row), tokens, params)
    stepper.run_until(lambda interval: interval.num_request_steps == setting.num_requests)
    return time.perf_counter() - clock


def _prompts(llm: LLM, setting: Setting) -> list[np.ndarray]:
    """Of a real model from the prompt set, of a dummy drawn."""
    tokenizer, count, length = llm.get_tokenizer(), setting.num_requests, setting.context_length
    if setting.dummy:
        banned = (*tokenizer.internal_ids, tokenizer.eos_token_id)
        return list(drawn(count, length or PROMPT_ROOM, llm.llm_engine.vocab_size, banned, setting.seed))
    prompts = contexts(prompt_rows(tokenizer, setting.prompts), count, length)
    longest = max(map(len, prompts))
    if length is None and longest > PROMPT_ROOM:
        raise ValueError(
            f"a prompt of {setting.prompts} has {longest} tokens, more than {PROMPT_ROOM}: give "
            "--context_length, to which all prompts are filled up"
        )
    return prompts


def _drafts(llm: LLM) -> tuple[np.ndarray, np.ndarray]:
    """Verified and accepted drafts by position so far."""
    stats = llm.llm_engine.stats
    return stats.verified_by_position.copy(), stats.accepted_by_position.copy()
