"""The path of a device with a queue of its own, graphs and one-operator sampling included, on a CPU: whatever
runs there gives the results of the CPU's own path."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest

from deepinfer.engine import parts
from deepinfer.runtime.step_time import StepSize, StepTimes
from deepinfer.sampling_params import SamplingParams
from deepinfer.settings import Settings
from tests.engine.matrix import bundled_prompts
from tests.support.engines import facts, generate, make_llm
from tests.support.fake_queue import FakeQueue, fake_device

# No measured sizes: times on a CPU choose others each time.
GRAPHS = {"graph_interval": 24, "draft_graph_interval": 4}


def work() -> tuple[list[list[int]], list[SamplingParams]]:
    """Plain requests of all styles, ended by length, by a stop token, late and early."""
    prompts = [list(prompt) for prompt in bundled_prompts()[:7]]
    styles = ({"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.9, "top_k": 20})
    params = [
        SamplingParams(max_tokens=8 + 3 * row, seed=row, ignore_eos=row % 2 == 0, **styles[row % 3])
        for row in range(len(prompts))
    ]
    return prompts, params


def special() -> list[SamplingParams]:
    """Requests that no captured sampling serves."""
    return [
        SamplingParams(max_tokens=8, temperature=1.0, seed=1, logprobs=3),
        SamplingParams(max_tokens=8, temperature=0.0, repetition_penalty=1.2, presence_penalty=0.3),
        SamplingParams(max_tokens=8, temperature=1.0, seed=2, min_tokens=4, logit_bias={40: 2.0}),
        SamplingParams(max_tokens=8, temperature=1.0, seed=3, verification="ratio"),
    ]


@pytest.fixture(scope="module")
def expected() -> Iterator[tuple[Any, Any]]:
    """Of the CPU's own path."""
    with make_llm(max_num_seqs=4, settings=Settings()) as llm:
        yield facts(generate(llm, *work())), facts(generate(llm, work()[0][:4], special()))


@pytest.mark.parametrize("is_async", [True, False], ids=["async", "sync"])
def test_graphs_and_eager_steps_give_the_same(expected, is_async):
    queue = FakeQueue()
    settings = Settings(use_async_scheduling=is_async, **GRAPHS)
    with fake_device(queue), make_llm(max_num_seqs=4, settings=settings) as llm:
        assert facts(generate(llm, *work())) == expected[0]
        stats = llm.get_stats()
        assert stats.num_graph_steps > 10 and stats.num_eager_steps == stats.num_prefill_steps
        assert queue.num_replays >= 3 * stats.num_graph_steps, "forward, sampling and drafts"
        assert queue.num_waits == 0
        assert set(stats.device_seconds) == {"forward", "sample", "draft"}
        assert {"launch_forward", "launch_sample"} <= set(stats.host_seconds)
        assert stats.device_busy_seconds > 0
        assert facts(generate(llm, work()[0][:4], special())) == expected[1]


def test_without_graphs(expected):
    queue = FakeQueue()
    with fake_device(queue), make_llm(max_num_seqs=4, settings=Settings(enforce_eager=True)) as llm:
        assert facts(generate(llm, *work())) == expected[0]
        assert facts(generate(llm, work()[0][:4], special())) == expected[1]
        assert llm.get_stats().num_graph_steps == 0 and queue.captured == []


def test_without_drafts_and_without_graphs_of_the_drafter(expected):
    for settings in (Settings(num_draft_tokens=0, **GRAPHS), Settings(draft_enforce_eager=True, **GRAPHS)):
        queue = FakeQueue()
        with fake_device(queue), make_llm(max_num_seqs=4, settings=settings) as llm:
            assert facts(generate(llm, *work())) == expected[0]
        assert not any("drafts" in name for name in queue.captured) and queue.num_replays > 0


def test_rows_dealt_by_confidence(expected):
    """The total of a step is the host's, who has what is the device's; then it is padded."""
    queue = FakeQueue()
    settings = Settings(use_draft_budget=True, **GRAPHS)
    times = {(1, 1): 1.0, (4, 4): 1.2, (4, 12): 3.0, (4, 24): 9.0}
    curve = StepTimes(
        {StepSize(*size): ms for size, ms in times.items()}
        | {StepSize(n, n, is_drafted=False): 1.0 for n in (1, 4)}
    )
    measured = mock.patch.object(parts, "measure", return_value=curve)
    with fake_device(queue), measured, make_llm(max_num_seqs=4, settings=settings) as llm:
        assert facts(generate(llm, *work())) == expected[0]
        stats = llm.get_stats()
        assert stats.num_graph_steps > 10 and 0 < stats.num_verified < stats.num_drafted
