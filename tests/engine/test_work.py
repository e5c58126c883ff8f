"""The work of a step: Python's does not grow with the requests, the device's not with the history."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from typing import Any

import pytest

from deepinfer.entrypoints.llm import LLM
from deepinfer.sampling_params import SamplingParams
from deepinfer.settings import Settings
from tests.support.engines import PLAIN_STEPS, assert_idle, greedy, make_llm, prompt_of, watched
from tests.support.models import load_config

NUM_STEPS = 4

SETTINGS = {
    "plain": PLAIN_STEPS,
    "drafting": Settings(use_async_scheduling=False),
    "asynchronous": Settings(use_async_scheduling=True),
}


def calls_of_steps(settings: Settings, params: list[SamplingParams]) -> tuple[int, Counter]:
    """Calls of Python and C functions, in all threads, of some decode steps: number, and number of each."""
    calls: Counter = Counter()
    is_counting = False

    def count(frame: Any, event: str, arg: Any) -> None:
        if is_counting and event in ("call", "c_call"):
            code = frame.f_code
            calls[arg.__name__ if event == "c_call" else f"{code.co_filename}:{code.co_name}"] += 1

    threading.setprofile(count)  # for threads that begin from here on
    before = sys.getprofile()
    sys.setprofile(count)
    try:
        with make_llm(settings=settings, max_num_seqs=64, max_model_len=256) as llm:
            engine = llm.llm_engine
            for place, param in enumerate(params):
                engine.add_request(f"r{place}", list(prompt_of(8, place)), param)
            for _ in range(4):  # prefill, and what happens once
                engine.step()
            assert engine.core.num_running == len(params)
            engine._executor.drain()  # whole steps only, also of the device's thread
            is_counting = True
            for _ in range(NUM_STEPS):
                assert engine.step() == []
            engine._executor.drain()
            is_counting = False
            assert engine.core.num_running == len(params)
            engine.drop_request([f"r{place}" for place in range(len(params))])
            engine.settle()
            assert_idle(llm)
    finally:
        sys.setprofile(before)
        threading.setprofile(None)
    return sum(calls.values()), calls


@pytest.mark.parametrize("style", [{"temperature": 0}, {"temperature": 1.0, "top_p": 0.9, "seed": 1}])
@pytest.mark.parametrize("name", SETTINGS)
def test_python_calls_do_not_grow_with_the_requests(name, style):
    """Schedule, build, launch, forward, sampling and commit of 8 and of 64 running requests."""
    params = SamplingParams(**style, max_tokens=200, ignore_eos=True)
    few, few_calls = calls_of_steps(SETTINGS[name], [params] * 8)
    many, many_calls = calls_of_steps(SETTINGS[name], [params] * 64)
    assert few > 500, "calls were counted"
    growth = (many - few) / NUM_STEPS
    more = (many_calls - few_calls).most_common(8)
    assert growth < 20, f"{growth} more calls per step for 56 more requests: {more}"


def test_text_is_read_only_where_it_is_needed():
    """One request of 64 with a stop string costs what one costs."""
    plain = greedy(200)
    none, _ = calls_of_steps(PLAIN_STEPS, [plain] * 64)
    one, _ = calls_of_steps(PLAIN_STEPS, [plain] * 63 + [greedy(200, stop="zq")])
    assert 1 <= (one - none) / NUM_STEPS < 60


def decode_work(llm: LLM, length: int) -> tuple[list[int], Any]:
    """Rows computed per layer and cache traffic of the second decode step behind a prompt of `length`."""
    engine, runner = llm.llm_engine, llm.llm_engine.model_runner
    engine.add_request("a", list(prompt_of(length)), greedy(4))
    with watched(llm) as core:
        while not core.plans or core.plans[-1].is_prefill:
            engine.step()
    rows, traffic = runner._model.counters, runner._caches.counters
    rows.reset()
    traffic.reset()
    engine.step()
    found = [*rows.kv_rows, *rows.query_rows], {**vars(traffic)}
    engine.drop_request(["a"])
    engine.settle()
    return found


def test_a_decoded_token_costs_one_row_and_what_it_reads():
    """No row of a history of 4,000 tokens is computed again; only index keys grow, by 68 bytes an entry."""
    config = load_config("v41-tiny")
    layers, window = config.num_hidden_layers, config.sliding_window
    sources = [config.kv_source(layer) for layer in range(layers)]
    work = {}
    with make_llm(settings=PLAIN_STEPS, max_num_seqs=1, max_model_len=4096) as llm:
        for length in (500, 1000, 4000):
            rows, work[length] = decode_work(llm, length)
            assert rows == [1] * (2 * layers), "one row for each layer"
    chosen = config.candidate_topk_blocks * config.candidate_block_size
    indexers = [layer for layer in range(layers) if layer in config.index_source_layer_ids]
    for length, found in work.items():
        assert found["window_records_read"] == layers * window
        assert found["window_records_written"] == layers
        assert found["query_rows"] == layers
        assert found["main_records_read"] == config.index_topk * sum(s is not None for s in sources)
        visible = 0
        for layer in indexers:
            entries = (length + 2) // config.ratio(layer)
            visible += min(entries, chosen) if config.is_restricted(layer) else entries
        assert found["index_keys_read"] == visible
        fixed = layers * window * 528 + found["main_records_read"] * 288
        assert found["bytes_read"] == fixed + 68 * visible
