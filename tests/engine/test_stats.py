"""What the engine knows of itself between steps: totals, and the times of a request that still runs."""

from __future__ import annotations

import pytest

from tests.support.engines import PLAIN_STEPS, generate, greedy, make_llm, prompt_of

PROMPTS = [list(prompt_of(length)) for length in (3, 150, 40)]


@pytest.fixture(scope="module")
def llm():
    with make_llm(settings=PLAIN_STEPS, max_num_seqs=2) as llm:
        yield llm


def test_times_of_a_request_that_runs(llm):
    engine = llm.llm_engine
    engine.add_request("a", PROMPTS[0], greedy(3), stream=True)
    (state,) = engine.step()
    assert not state.finished and state.metrics.ttft_ms > 0
    assert state.metrics.total_ms is state.metrics.tpot_ms is None
    while engine.has_unfinished_requests():
        engine.step()


def test_totals(llm):
    stats = llm.llm_engine.stats
    names = ("num_steps", "num_prefill_steps", "num_prefill_tokens", "num_output_tokens", "num_finished")
    before = {name: getattr(stats, name) for name in names}
    generate(llm, PROMPTS[:2], greedy(6))
    found = {name: getattr(stats, name) - before[name] for name in names}
    assert found == {
        "num_steps": 6,
        "num_prefill_steps": 1,
        "num_prefill_tokens": 153,
        "num_output_tokens": 12,
        "num_finished": 2,
    }
    assert {"schedule", "build", "commit", "text"} <= set(stats.timers.seconds)
    assert min(stats.timers.seconds.values()) > 0
