"""What the engine tells of itself: metrics of requests, totals, the log line, the bar and the summary."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from deepinfer.sampling_params import SamplingParams
from deepinfer.settings import Settings
from tests.support.engines import PLAIN_STEPS, generate, greedy, make_llm, prompt_of

PROMPTS = [list(prompt_of(length)) for length in (3, 150, 40)]


@contextmanager
def log_lines(name: str = "deepinfer") -> Iterator[list[str]]:
    """Messages of a logger, whatever the program did to its handlers."""
    lines: list[str] = []

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    logger, collector = logging.getLogger(name), Collector()
    level = logger.level
    logger.addHandler(collector)
    logger.setLevel(logging.INFO)
    try:
        yield lines
    finally:
        logger.removeHandler(collector)
        logger.setLevel(level)


@pytest.fixture(scope="module")
def llm():
    with make_llm(settings=PLAIN_STEPS, max_num_seqs=2) as llm:
        yield llm


def test_times_of_a_request(llm):
    before, clock = time.time(), time.monotonic()
    outputs = generate(llm, PROMPTS, greedy(6))
    elapsed_ms = 1e3 * (time.monotonic() - clock)
    for output in outputs:
        m = output.metrics
        assert before <= m.arrival_time <= time.time()
        assert 0 <= m.queue_ms < m.ttft_ms < m.total_ms <= elapsed_ms
        assert m.tpot_ms == pytest.approx((m.total_ms - m.ttft_ms) / 5)
        assert (m.num_preemptions, m.num_cached_tokens, m.num_draft_tokens, m.num_accepted_tokens) == (0,) * 4
    first, last = outputs[0].metrics, outputs[2].metrics
    assert last.queue_ms > first.ttft_ms, "two run at once; the third waits until one has ended"


def test_a_request_of_one_token_has_no_time_per_token(llm):
    metrics = generate(llm, PROMPTS[:1], greedy(1))[0].metrics
    assert metrics.tpot_ms is None and metrics.ttft_ms <= metrics.total_ms


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


def test_metrics_of_drafts():
    with make_llm(max_num_seqs=2) as llm:
        (output,) = llm.chat(
            [{"role": "user", "content": "Tell me a story about a fox."}], greedy(40), use_tqdm=False
        )
        assert 0 < output.metrics.num_accepted_tokens <= output.metrics.num_verified_tokens
        assert llm.llm_engine.stats.tokens_per_step > 1
        assert len(output.outputs[0].token_ids) == 40


@pytest.mark.parametrize("interval", [1, 3, 100])
def test_the_log_line_when_asked(interval):
    settings = Settings(num_draft_tokens=0, use_async_scheduling=False, logging_interval_steps=interval)
    with make_llm(settings=settings, disable_log_stats=False) as llm, log_lines("deepinfer.engine") as lines:
        generate(llm, PROMPTS, greedy(9))
    assert len(lines) == 9 // interval
    for line in lines:
        assert re.fullmatch(
            r"steps \d+\.\d/s \(\d+% prefill\), prompt \d+\.\d tok/s, output \d+\.\d tok/s, running \d, "
            r"waiting 0, free blocks \d+, finished \d, preempted 0, \d+\.\d\d tokens per decode step.*",
            line,
        ), line
    if interval == 1:
        assert "(100% prefill)" in lines[0] and "(0% prefill)" in lines[1]
        assert "running 3" in lines[4] and "finished 3" in lines[-1]


@pytest.mark.parametrize(
    "options", [{"disable_log_stats": True}, {}, {"interval": 0, "disable_log_stats": False}]
)
def test_no_log_line_unless_asked(options):
    interval = options.pop("interval", 1)
    settings = Settings(num_draft_tokens=0, logging_interval_steps=interval)
    with make_llm(settings=settings, **options) as llm, log_lines("deepinfer.engine") as lines:
        generate(llm, PROMPTS, greedy(3))
    assert lines == []


def test_the_summary_line(llm):
    with log_lines() as lines:
        generate(llm, PROMPTS, SamplingParams(n=2, max_tokens=3, ignore_eos=True))
        generate(llm, [*PROMPTS[:1], []], greedy(2), on_error="return")
        results = llm.generate_iter(PROMPTS, greedy(2))
        next(results)
        results.close()
        generate(llm, [], greedy(2))
    wanted = [
        "3 of 3 requests in T s: 193 prompt tokens, 18 output tokens, prompt R tok/s, output R tok/s",
        "2 of 2 requests in T s: 3 prompt tokens, 2 output tokens, prompt R tok/s, output R tok/s",
        r"[12] of 3 requests in T s: \d+ prompt tokens, [24] output tokens, prompt R tok/s, output R tok/s",
        "0 of 0 requests in T s: 0 prompt tokens, 0 output tokens, prompt R tok/s, output R tok/s",
    ]
    patterns = [line.replace(" T ", r" \d+\.\d\d ").replace(" R ", r" \d+\.\d ") for line in wanted]
    assert len(lines) == len(patterns)
    for line, pattern in zip(lines, patterns, strict=True):
        assert re.fullmatch(pattern, line), line


def test_the_bar(llm, capsys):
    llm.generate(PROMPTS, greedy(3), use_tqdm=True)
    shown = capsys.readouterr().err
    assert "3/3" in shown and "requests" in shown
    assert re.search(r"prompt \d+\.\d tok/s, output \d+\.\d tok/s", shown)
    llm.generate(PROMPTS, greedy(3), use_tqdm=False)
    assert "3/3" not in capsys.readouterr().err
