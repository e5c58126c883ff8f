"""What the engine knows of itself between steps: totals, and the times of a request that still runs."""

from __future__ import annotations

import pytest

from deepinfer.engine.summary import Quantiles, RequestTimes
from deepinfer.outputs import RequestMetrics
from deepinfer.settings import Settings
from tests.support.engines import PLAIN_STEPS, generate, greedy, make_llm, prompt_of

PROMPTS = [list(prompt_of(length)) for length in (3, 150, 40)]


@pytest.fixture(scope="module")
def llm():
    with make_llm(settings=PLAIN_STEPS, max_num_seqs=2, enable_prefix_caching=False) as llm:
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


@pytest.mark.parametrize("is_async", [False, True])
def test_the_summary_is_the_sum_of_its_requests(is_async):
    with make_llm("v41-tiny", settings=Settings(num_draft_tokens=3, use_async_scheduling=is_async)) as llm:
        outputs = generate(llm, PROMPTS, greedy(20, n=2))
        stats = llm.get_stats()
    metrics = [output.metrics for output in outputs]
    assert stats.num_output_tokens == sum(len(c.token_ids) for output in outputs for c in output.outputs)
    assert stats.num_finished_sequences == 2 * len(PROMPTS) and stats.num_steps > stats.num_prefill_steps > 0
    assert (stats.num_overlapped_steps > 0) == is_async
    cached = stats.num_cached_tokens, stats.num_prefix_hits, stats.num_forks
    num_shared = sum(len(prompt) - 1 for prompt in PROMPTS)  # what the second completions do not compute
    assert cached == (num_shared, 0, len(PROMPTS))
    for name, field in (
        ("num_drafted", "num_draft_tokens"),
        ("num_verified", "num_verified_tokens"),
        ("num_accepted", "num_accepted_tokens"),
    ):
        assert getattr(stats, name) == sum(getattr(each, field) for each in metrics) > 0, name
    for name in ("verified_by_position", "accepted_by_position"):
        assert list(getattr(stats, name)) == [sum(p) for p in zip(*(getattr(m, name) for m in metrics))]
    assert sum(stats.accepted_by_position) == stats.num_accepted < stats.num_verified
    decoded = sum(each.num_decode_tokens for each in metrics)
    assert decoded == stats.num_output_tokens - 2 * len(PROMPTS)  # the first tokens are the prefill's
    assert stats.tokens_per_step == decoded / sum(each.num_decode_steps for each in metrics) > 1
    assert metrics[0].tokens_per_step == metrics[0].num_decode_tokens / metrics[0].num_decode_steps
    assert {"schedule", "build", "commit", "text", "wait"} <= set(stats.host_seconds)
    assert {"forward", "sample", "draft"} <= set(stats.device_seconds)
    assert 0 < sum(stats.device_seconds.values()) <= stats.device_busy_seconds
    assert is_async or stats.hidden_host_seconds == 0
    assert stats.hidden_host_seconds <= stats.host_work_seconds
    assert stats.ttft_ms.count == len(PROMPTS) and stats.queue_ms.p99 <= stats.ttft_ms.p99
    blocks = [sum(each.count for each in bins) for bins in stats.reliability]
    assert len(blocks) == 3 and blocks[0] >= blocks[1] >= blocks[2] > 0
    report = str(stats)
    assert f"{stats.num_verified} verified" in report and len(report.splitlines()) == 13 + 3


def test_quantiles_of_request_times():
    times = RequestTimes()
    assert times.quantiles()[0].count == 0
    for ms in range(101):
        times.add(RequestMetrics(queue_ms=ms, ttft_ms=2 * ms, tpot_ms=None if ms else 7.0))
    queue, ttft, tpot = times.quantiles()
    assert queue == Quantiles(101, 50, 50, 90, 99) and ttft == Quantiles(101, 100, 100, 180, 198)
    assert tpot == Quantiles(1, 7, 7, 7, 7)
