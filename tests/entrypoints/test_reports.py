"""What a run says about itself: metrics of a request, log lines, the progress bar."""

from __future__ import annotations

import dataclasses
import logging
import re
import time

import pytest

from deepinfer.settings import Settings
from tests.support.engines import PLAIN_STEPS, assert_idle, generate, greedy, make_llm, prompt_of

PROMPTS = [list(prompt_of(length)) for length in (3, 9, 5)]
SUMMARY = re.compile(
    r"(\d+) of (\d+) requests in \d+\.\d\d s: (\d+) prompt tokens, (\d+) output tokens, "
    r"prompt \d+\.\d tok/s, output \d+\.\d tok/s"
)
PERIODIC = re.compile(
    r"steps [\d.]+/s \((\d+)% prefill\), prompt [\d.]+ tok/s, output [\d.]+ tok/s, running (\d+), "
    r"waiting (\d+), free blocks (\d+), finished (\d+), preempted (\d+), [\d.]+ tokens per decode step"
)


@pytest.fixture
def lines():
    """Messages that the engine logs."""
    found: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record):
            found.append(record.getMessage())

    logger, handler = logging.getLogger("deepinfer"), Keep()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield found
    logger.removeHandler(handler)
    logger.setLevel(level)


# Metrics


def test_times_of_a_request(llm):
    before = time.time()
    outputs = generate(llm, PROMPTS, [greedy(12), greedy(1), greedy(2)])
    wall_ms = 1e3 * (time.time() - before)
    for output in outputs:
        metrics = output.metrics
        assert before - 1 <= metrics.arrival_time <= time.time() + 1
        assert 0 <= metrics.queue_ms <= metrics.ttft_ms <= metrics.total_ms <= wall_ms
        assert (metrics.num_preemptions, metrics.num_cached_tokens) == (0, 0)
        assert 0 <= metrics.num_accepted_tokens <= metrics.num_verified_tokens
        count = len(output.outputs[0].token_ids)
        if count == 1:
            assert metrics.tpot_ms is None
        else:
            rest = metrics.total_ms - metrics.ttft_ms
            assert metrics.tpot_ms == pytest.approx(rest / (count - 1)) and rest > 0
    assert outputs[0].metrics.total_ms > outputs[1].metrics.total_ms


def test_waiting_shows_in_the_queue_time():
    with make_llm("tiny-quant", settings=PLAIN_STEPS, max_num_seqs=1) as llm:
        first, second, third = (output.metrics for output in generate(llm, PROMPTS, greedy(4)))
    assert first.queue_ms < second.queue_ms < third.queue_ms
    assert second.queue_ms >= first.total_ms * 0.9


def test_drafts_are_counted(llm):
    """A text that the drafter knows: tokens are accepted drafts, or come one a step."""
    stats = llm.llm_engine.stats
    before = int(stats.accepted_by_position.sum()), int(stats.verified_by_position.sum())
    metrics = generate(llm, "Once upon a time", greedy(24))[0].metrics
    after = int(stats.accepted_by_position.sum()), int(stats.verified_by_position.sum())
    assert 0 < metrics.num_accepted_tokens < metrics.num_verified_tokens
    assert (metrics.num_accepted_tokens, metrics.num_verified_tokens) == tuple(
        new - old for new, old in zip(after, before, strict=True)
    )


def test_no_drafts_without_speculation():
    with make_llm("tiny-quant", settings=PLAIN_STEPS, max_num_seqs=4) as llm:
        for output in generate(llm, PROMPTS, greedy(3)):
            assert (output.metrics.num_verified_tokens, output.metrics.num_accepted_tokens) == (0, 0)


# Log lines


def test_one_summary_line(llm, lines):
    outputs = generate(llm, [*PROMPTS, []], greedy(3, n=2), on_error="return")
    assert outputs[3].error is not None
    (line,) = lines
    assert [int(number) for number in SUMMARY.fullmatch(line).groups()] == [4, 4, 3 + 9 + 5, 3 * 2 * 3]


def test_the_summary_of_a_call_that_ends_early(llm, lines):
    results = llm.generate_iter(PROMPTS[:2], [greedy(1), greedy(50)])
    next(results)
    assert lines == []
    results.close()
    (line,) = lines
    assert [int(number) for number in SUMMARY.fullmatch(line).groups()] == [1, 2, 3, 1]
    assert_idle(llm)


@pytest.mark.parametrize("interval", [5, 1, 0, -3, 1000])
def test_periodic_lines(lines, interval):
    settings = Settings.from_env({"DEEPINFER_LOGGING_INTERVAL_STEP": str(interval)})
    settings = dataclasses.replace(settings, num_draft_tokens=0, use_async_scheduling=False)
    with make_llm("tiny-quant", settings=settings, max_num_seqs=2, disable_log_stats=False) as llm:
        generate(llm, PROMPTS, greedy(6))
        stats, num_blocks = llm.llm_engine.stats, llm.llm_engine.cache_config.num_blocks
    found = [match for match in map(PERIODIC.fullmatch, lines) if match]
    assert len(found) == (stats.num_steps // interval if interval > 0 else 0)
    assert lines[0].startswith("memory plan") and len(lines) == len(found) + 2, "and the summary"
    assert (stats.num_output_tokens, stats.num_prefill_tokens, stats.num_finished) == (18, 17, 3)
    if interval == 1:
        columns = list(zip(*[map(int, match.groups()) for match in found], strict=True))
        prefill, running, waiting, free, finished, preempted = columns
        assert set(prefill) == {0, 100} and prefill.count(100) == stats.num_prefill_steps
        assert max(running) == 2 and max(waiting) == 1 and sum(finished) == 3 and set(preempted) == {0}
        assert all(0 < blocks < num_blocks for blocks in free)


def test_no_periodic_lines_unless_asked(lines):
    settings = Settings.from_env({"DEEPINFER_LOGGING_INTERVAL_STEP": "1"})
    with make_llm("tiny-quant", settings=settings, max_num_seqs=2) as llm:
        generate(llm, PROMPTS, greedy(3))
    plan, summary = lines
    assert plan.startswith("memory plan") and SUMMARY.fullmatch(summary)


# Progress bar


def test_the_progress_bar(llm, capsys):
    llm.generate(PROMPTS, greedy(2), use_tqdm=True)
    shown = capsys.readouterr().err
    assert "requests:   0%" in shown and "100%" in shown and "3/3" in shown
    assert re.search(r"prompt [\d.]+ tok/s, output [\d.]+ tok/s\]", shown)


def test_the_default_is_a_bar(llm, capsys):
    llm.generate(PROMPTS[0], greedy(1))
    assert "requests: 100%" in capsys.readouterr().err


def test_no_progress_bar(llm, capsys):
    llm.generate(PROMPTS, greedy(2), use_tqdm=False)
    list(llm.generate_iter(PROMPTS, greedy(2)))
    captured = capsys.readouterr()
    assert "requests:" not in captured.err and captured.out == ""


def test_a_bar_ends_with_its_call(llm, capsys):
    """Refused before it begins; closed when the iterator is."""
    with pytest.raises(ValueError, match="prompt 0"):
        llm.generate([[]], use_tqdm=True)
    assert "requests:" not in capsys.readouterr().err
    results = llm.generate_iter(PROMPTS[:2], [greedy(1), greedy(50)], use_tqdm=True)
    next(results)
    results.close()
    assert capsys.readouterr().err.rstrip(" ").endswith("\n")
    assert_idle(llm)
