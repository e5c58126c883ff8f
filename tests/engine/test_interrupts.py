"""Ctrl-C wherever it comes: the call ends, nothing is leaked, and later calls give what they always give."""

from __future__ import annotations

import contextlib
import random
import signal
import subprocess
import sys
import time

import pytest

from deepinfer.sampling_params import SamplingParams
from deepinfer.settings import Settings
from tests.engine.faults import faulty, interrupted_at
from tests.support.engines import PLAIN_STEPS, assert_idle, facts, generate, make_llm, prompt_of
from tests.support.paths import ROOT, V41_TINY
from tests.support.process import clean_env

PROMPTS = [prompt_of(length) for length in (2, 70, 9, 130)]
PARAMS = [
    SamplingParams(temperature=place % 2, seed=place, max_tokens=6, ignore_eos=True, logprobs=1, stop="zq")
    for place in range(len(PROMPTS))
]
OUR_CODE = ("deepinfer/engine", "deepinfer/entrypoints", "deepinfer/runtime")


@pytest.fixture(scope="module", params=["plain", "drafting"])
def llm(request):
    settings = {"plain": PLAIN_STEPS, "drafting": Settings(use_async_scheduling=True)}[request.param]
    with make_llm(settings=settings, max_num_batched_tokens=200) as llm:
        yield llm


@pytest.fixture(scope="module")
def want(llm):
    return facts(generate(llm, PROMPTS, PARAMS))


@pytest.mark.parametrize("step", [0, 1, 2])
def test_inside_the_forward(llm, want, step):
    calls = iter(range(1000))

    def interrupt(forward, batch, caches, **options):
        if next(calls) == step:
            raise KeyboardInterrupt
        return forward(batch, caches, **options)

    with faulty(llm, on_forward=interrupt), pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    assert_idle(llm)
    assert facts(generate(llm, PROMPTS, PARAMS)) == want


def count_lines(llm) -> int:
    """Lines of our code that one call runs in this thread."""
    with interrupted_at(-1, OUR_CODE) as found:
        llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    return found.count


def test_between_any_two_lines(llm, want, seed):
    """Lines at random out of all that the call runs in this thread, the first and the last among them."""
    order = random.Random(seed)
    count = count_lines(llm)
    lines = [1, count - 1, *(order.randrange(1, count) for _ in range(18))]
    places = set()
    for line in lines:
        with interrupted_at(line, OUR_CODE) as found, contextlib.suppress(KeyboardInterrupt):
            llm.generate(PROMPTS, PARAMS, use_tqdm=False)
        assert found.place is not None, "the call ended before that line"
        places.add(found.place)
        again = llm.generate(PROMPTS[:2], PARAMS[:2], use_tqdm=False)
        assert facts(again) == want[:2], found.place
        assert_idle(llm)
    assert len(places) > 10


def test_the_step_loop_goes_on_after_an_interrupt(llm, want, seed):
    """Whoever drives the engine keeps every request that had not ended in the interrupted step."""
    engine, order = llm.llm_engine, random.Random(seed)
    for _ in range(12):
        for place, (prompt, params) in enumerate(zip(PROMPTS, PARAMS, strict=True)):
            engine.add_request(f"r{place}", list(prompt), params, stream=place == 3)
        done, lost = {}, 0
        with interrupted_at(order.randrange(1, 1500), ("deepinfer/engine", "deepinfer/runtime")) as found:
            for _ in range(300):
                try:
                    if not engine.has_unfinished_requests():
                        break
                    ended = [output for output in engine.step() if output.finished]
                except KeyboardInterrupt:
                    lost = 1
                    continue
                done |= {output.request_id: output for output in ended}
        assert not engine.has_unfinished_requests(), found.place
        engine.settle()
        assert_idle(llm)
        for place in range(len(PROMPTS)):
            if f"r{place}" in done:
                assert facts([done[f"r{place}"]]) == [want[place]], found.place
            else:
                assert lost, f"result {place} is missing"


def test_a_signal_ends_a_call_in_another_process():
    code = f"""
import sys
from deepinfer import LLM, SamplingParams
prompts = [[20 + i, 30, 40] for i in range(8)]
short = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
long = SamplingParams(temperature=0, max_tokens=3000, ignore_eos=True)
with LLM({str(V41_TINY)!r}, max_num_seqs=8) as llm:
    tokens = lambda: [o.outputs[0].token_ids for o in llm.generate(prompts, short, use_tqdm=False)]
    before = tokens()
    for _ in range(2):
        print("ready", flush=True)
        try:
            llm.generate(prompts, long, use_tqdm=True)
            print("it was not interrupted")
        except KeyboardInterrupt:
            llm.llm_engine.core.check_integrity()
            assert llm.llm_engine.core.num_unfinished == 0 == llm.llm_engine.core.num_in_flight
            print("interrupted", tokens() == before, flush=True)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=clean_env(),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        for delay in (0.3, 1.1):
            assert process.stdout.readline() == "ready\n"
            time.sleep(delay)
            process.send_signal(signal.SIGINT)
            assert process.stdout.readline() == "interrupted True\n"
        assert process.wait(timeout=60) == 0
    finally:
        process.kill()
        process.wait()
