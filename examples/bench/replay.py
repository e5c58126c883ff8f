"""Replay: requests that arrive over time, as a Poisson process or as a file says, and their latencies."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from deepinfer import LLM, SamplingParams, Settings
from examples.bench.arithmetic import quantiles
from examples.bench.engines import Stepper, check_token_counts, opened
from examples.bench.prompts import contexts, drawn, prompt_rows
from examples.bench.setting import Setting

BLOCK = 128
POISSON = "poisson:"


@dataclass(frozen=True)
class Arrival:
    """One request of a trace.

    Attributes:
        at_s: seconds after the start.
        output_tokens: that it is answered with.
        prompt: its text; None to take one of the prompt set, or of
        prompt_tokens: drawn tokens.
    """

    at_s: float
    output_tokens: int
    prompt: str | None = None
    prompt_tokens: int | None = None


def poisson_arrivals(rate: float, count: int, output_tokens: int, seed: int) -> list[Arrival]:
    """`count` requests with `rate` of them a second in the mean."""
    gaps = np.random.default_rng(seed).exponential(1.0 / rate, size=count)
    return [Arrival(float(at), output_tokens) for at in np.cumsum(gaps)]


def read_arrivals(file: Path) -> list[Arrival]:
    """A trace from JSON lines: `arrival_s`, `output_tokens`, and `prompt` or `prompt_tokens`.

    Raises:
        ValueError: a line is something else.
    """
    arrivals = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            each = Arrival(
                float(entry["arrival_s"]),
                int(entry["output_tokens"]),
                entry.get("prompt"),
                None if entry.get("prompt_tokens") is None else int(entry["prompt_tokens"]),
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f'{file}, line {number}: expected {{"arrival_s": 0.5, "output_tokens": 32, "prompt": "text"}}'
                f' or "prompt_tokens": 512 instead of a text; {type(error).__name__}: {error}'
            ) from error
        if each.at_s < 0 or each.output_tokens < 1 or (each.prompt_tokens or 1) < 1:
            raise ValueError(f"{file}, line {number}: times are >= 0, counts of tokens >= 1: {line.strip()}")
        arrivals.append(each)
    if not arrivals:
        raise ValueError(f"{file} holds no request")
    return sorted(arrivals, key=lambda each: each.at_s)


def trace_of(setting: Setting) -> list[Arrival]:
    """The arrivals that a setting names.

    Raises:
        ValueError: it names neither a rate nor a readable file.
    """
    name = setting.arrivals or ""
    if not name.startswith(POISSON):
        if not Path(name).is_file():
            raise ValueError(f"--trace {name}: expected poisson:REQUESTS_PER_SECOND or a file of JSON lines")
        return read_arrivals(Path(name))
    try:
        rate = float(name.removeprefix(POISSON))
    except ValueError:
        rate = 0.0
    if not 0 < rate < float("inf"):
        raise ValueError(f"--trace {name}: expected poisson: and a number of requests per second above 0")
    return poisson_arrivals(rate, setting.num_arrivals, setting.output_tokens, setting.seed)


def measure_trace(setting: Setting, settings: Settings) -> dict[str, Any]:
    """Run the trace; latencies count from the time that the trace says, in milliseconds."""
    arrivals = trace_of(setting)
    length = max([setting.context_length or 512, *(each.prompt_tokens or 0 for each in arrivals)])
    max_model_len = length + max(each.output_tokens for each in arrivals)
    with opened(
        setting,
        settings,
        max_num_seqs=setting.num_requests,
        max_model_len=max_model_len,
        max_num_batched_tokens=max(
            setting.prefill_batch_size, setting.num_requests * (1 + setting.num_drafts)
        ),
        num_blocks=setting.num_requests * -(-max_model_len // BLOCK) + 1,
        enable_prefix_caching=False,
    ) as (llm, stepper):
        prompts = _prompts(llm, setting, arrivals)
        lateness, seconds = _replay(stepper, setting, arrivals, prompts)
        stats = llm.llm_engine.stats
        num_tokens = check_token_counts(stepper.outputs, stats.num_output_tokens)
        per_step = stats.tokens_per_step
    expected = sum(each.output_tokens for each in arrivals)
    if num_tokens != expected:
        raise RuntimeError(f"{num_tokens} output tokens instead of {expected}")
    by_id = {output.request_id: output.metrics for output in stepper.outputs}
    rows = [(late, by_id[name]) for name, late in lateness.items()]
    return {
        "num_arrivals": len(arrivals),
        "seconds": seconds,
        "requests_per_s": len(arrivals) / seconds,
        "tokens_per_s": num_tokens / seconds,
        "tokens_per_s_per_device": num_tokens / seconds / setting.num_devices,
        "tokens_per_request_step": per_step,
        "tokens_are_meaningful": not setting.dummy,
        **quantiles("ttft_ms", (late + metrics.ttft_ms for late, metrics in rows)),
        **quantiles("tpot_ms", (metrics.tpot_ms for _, metrics in rows)),
        **quantiles("queue_ms", (late + metrics.queue_ms for late, metrics in rows)),
        **quantiles("total_ms", (late + metrics.total_ms for late, metrics in rows)),
        "num_output_tokens": num_tokens,
    }


def _replay(
    stepper: Stepper, setting: Setting, arrivals: list[Arrival], prompts: list[np.ndarray]
) -> tuple[dict[str, float], float]:
    """Submit each request when it is due; how late each was, ms, for the step that ran; seconds in all."""
    lateness: dict[str, float] = {}
    start = time.perf_counter()
    while len(lateness) < len(arrivals) or stepper.engine.has_unfinished_requests():
        now = time.perf_counter() - start
        while len(lateness) < len(arrivals) and arrivals[len(lateness)].at_s <= now:
            row = len(lateness)
            params = SamplingParams(
                temperature=setting.temperature,
                seed=setting.seed + row,
                max_tokens=arrivals[row].output_tokens,
                ignore_eos=True,
                detokenize=False,
            )
            stepper.submit(str(row), prompts[row], params)
            lateness[str(row)] = 1e3 * (time.perf_counter() - start - arrivals[row].at_s)
        if stepper.engine.has_unfinished_requests():
            stepper.step()
        elif len(lateness) < len(arrivals):
            time.sleep(max(0.0, arrivals[len(lateness)].at_s - (time.perf_counter() - start)))
    stepper.engine.settle()
    return lateness, time.perf_counter() - start


def _prompts(llm: LLM, setting: Setting, arrivals: list[Arrival]) -> list[np.ndarray]:
    tokenizer = llm.get_tokenizer()
    banned = (*tokenizer.internal_ids, tokenizer.eos_token_id)
    own = [[0]] if setting.dummy else prompt_rows(tokenizer, setting.prompts)
    of_set = contexts(own, len(arrivals), setting.context_length)
    prompts = []
    for row, each in enumerate(arrivals):
        if each.prompt is not None:
            prompts.append(np.asarray(tokenizer.encode(each.prompt), dtype=np.int32))
        elif each.prompt_tokens is not None or setting.dummy:
            length = each.prompt_tokens or setting.context_length or 512
            prompts.append(drawn(1, length, llm.llm_engine.vocab_size, banned, setting.seed + row)[0])
        else:
            prompts.append(of_set[row])
    return prompts
