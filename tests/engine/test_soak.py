"""A soak: thousands of mixed requests in one engine, aborted, preempted, forked and resumed at random."""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from typing import Any

import pytest

from deepinfer.sampling_params import SamplingParams
from deepinfer.settings import Settings
from tests.support.engines import PLAIN_STEPS, assert_idle, facts, generate, make_llm, prompt_of, watched

NUM_REQUESTS = 2000
STYLES = (
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_p": 0.9, "logprobs": 2},
    {"temperature": 0.8, "min_p": 0.05, "repetition_penalty": 1.2},
    {"temperature": 1.0, "verification": "coupled", "presence_penalty": 0.5, "stop_token_ids": [300, 301]},
)


def kinds() -> tuple[list[list[int]], list[SamplingParams]]:
    """60 kinds of requests: prompts of one block and less, and families that share two blocks or one."""
    trunk = list(prompt_of(256))
    prompts = [list(prompt_of(length, seed=length)) for length in (1, 5, 60, 127, 128, 129)]
    prompts += [trunk[:cut] + list(prompt_of(tail, seed=cut)) for cut in (128, 160, 256) for tail in (1, 20)]
    prompts = [prompts[i % len(prompts)] for i in range(60)]
    params = [
        SamplingParams(
            max_tokens=1 + 5 * i % 7, seed=i, ignore_eos=i % 2 == 0, n=1 + (i % 7 == 0), **STYLES[i % 5]
        )
        for i in range(60)
    ]
    return prompts, params


@pytest.mark.slow
def test_soak(seed):
    prompts, params = kinds()
    with make_llm("v41-tiny", settings=PLAIN_STEPS, enable_prefix_caching=False) as llm:
        expected = facts(generate(llm, prompts, params))
    rng = random.Random(seed)
    counts: Counter[str] = Counter()
    settings = Settings(num_draft_tokens=3)
    options = {"max_num_seqs": 24, "num_blocks": 32, "num_prefix_states": 6, "preemption_mode": "swap"}
    with make_llm("v41-tiny", settings=settings, **options) as llm, watched(llm) as core:
        engine = llm.llm_engine
        weights = [3 if len(prompt) < 100 else 1 for prompt in prompts]  # short ones are cheap
        kind_of: dict[str, int] = {}
        aborted: set[str] = set()
        results: dict[str, Any] = {}
        while len(results) < NUM_REQUESTS:
            while len(kind_of) < NUM_REQUESTS and engine.get_num_unfinished_requests() < 40:
                name, kind = str(len(kind_of)), rng.choices(range(60), weights)[0]
                repeats = rng.choice((1, 1, 1, 3))  # equal prompts side by side
                engine.add_request(name, prompts[kind], params[kind])
                kind_of[name] = kind
                for _ in range(repeats - 1):
                    if len(kind_of) < NUM_REQUESTS:
                        name = str(len(kind_of))
                        engine.add_request(name, prompts[kind], params[kind])
                        kind_of[name] = kind
            if rng.random() < 0.1:
                name = rng.choice([name for name in kind_of if name not in results])
                if engine.abort_request(name):
                    aborted.add(name)
            if core.plans and rng.random() < 0.2:
                with contextlib.suppress(KeyError):  # it has ended
                    counts["preempted"] += core.preempt(int(rng.choice(core.plans[-1].seq_ids)))
            for output in engine.step():
                assert output.request_id not in results, "two results"
                results[output.request_id] = output
            core.check_integrity()
        engine.settle()
        assert_idle(llm)
        assert engine._swap.num_held == core.swap_stats().num_held == 0
        stats = llm.get_stats()
        cache = engine.prefix_cache_stats()
    assert results.keys() == kind_of.keys()
    for name, output in results.items():
        if name in aborted:
            counts["aborted"] += any(sample.finish_reason == "abort" for sample in output.outputs)
        else:
            assert facts([output]) == [expected[kind_of[name]]], f"request {name} of kind {kind_of[name]}"
    assert counts["aborted"] > 50 and counts["preempted"] > 20, counts
    assert stats.num_swapped_out > 20 and stats.num_swapped_in > 10 and stats.swapped_in_bytes > 0
    assert stats.num_accepted > 300 and stats.num_overlapped_steps > 300
    assert cache.num_hits > 300 and cache.num_forks > 100 and cache.num_evicted_blocks > 10, cache
