"""Aborts: from any queue, at any time, from any thread; the result says what there was."""

from __future__ import annotations

import random
import threading
import time

import pytest

from deepinfer.sampling_params import SamplingParams
from deepinfer.settings import Settings
from tests.support.engines import PLAIN_STEPS, assert_idle, greedy, make_llm, prompt_of


@pytest.fixture(params=["plain", "drafting"])
def llm(request):
    settings = {"plain": PLAIN_STEPS, "drafting": Settings(use_async_scheduling=True)}[request.param]
    with make_llm(settings=settings, max_num_seqs=4, max_num_batched_tokens=64) as llm:
        yield llm


def run_to_end(engine, done: dict | None = None) -> dict:
    """Step until nothing is left; finished results by id, each exactly once."""
    done = {} if done is None else done
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                assert output.request_id not in done
                done[output.request_id] = output
    engine.settle()
    return done


def test_between_steps(llm):
    engine = llm.llm_engine
    whole = llm.generate([prompt_of(9), prompt_of(20)], greedy(24), use_tqdm=False)
    engine.add_request("a", list(prompt_of(9)), greedy(24))
    engine.add_request("b", list(prompt_of(20)), greedy(24))
    for _ in range(4):
        engine.step()
    assert engine.abort_request("a") == 1
    assert engine.abort_request("a") == 0, "it has ended"
    done = run_to_end(engine)
    sample = done["a"].outputs[0]
    assert (sample.finish_reason, sample.error, sample.stop_reason) == ("abort", None, None)
    assert 0 < len(sample.token_ids) < 24
    assert sample.token_ids == whole[0].outputs[0].token_ids[: len(sample.token_ids)]
    assert sample.text == llm.get_tokenizer().decode(sample.token_ids, skip_special_tokens=True)
    assert done["b"].outputs[0].token_ids == whole[1].outputs[0].token_ids
    assert_idle(llm)


def test_before_the_first_step(llm):
    engine = llm.llm_engine
    engine.add_request("a", [20, 30], greedy(4, logprobs=1, prompt_logprobs=1))
    assert engine.abort_request(["a", "unknown"]) == 1
    (output,) = engine.step()
    sample = output.outputs[0]
    assert output.finished and (sample.finish_reason, sample.token_ids, sample.text) == ("abort", [], "")
    assert sample.logprobs == [] and output.prompt_logprobs == [None]
    assert output.metrics.queue_ms is None and output.metrics.ttft_ms is None
    assert not engine.has_unfinished_requests()
    assert_idle(llm)


def test_between_chunks_of_the_prompt(llm):
    """Blocks and slot of a prompt that is partly computed come back."""
    engine = llm.llm_engine
    engine.add_request("a", list(prompt_of(300)), greedy(4, prompt_logprobs=0))
    engine.step()
    engine.step()
    assert engine.core.num_free_slots < engine.cache_config.num_state_slots - 1
    assert engine.abort_request("a") == 1
    done = run_to_end(engine)
    assert done["a"].outputs[0].token_ids == []
    assert 0 < len(done["a"].prompt_token_logprobs) < 299, "the scores that there were"
    assert_idle(llm)


def test_while_waiting(llm):
    engine = llm.llm_engine
    for place in range(9):  # four run
        engine.add_request(f"r{place}", list(prompt_of(5 + place)), greedy(6))
    engine.step()
    assert engine.abort_request(["r7", "r8"]) == 2
    done = run_to_end(engine)
    assert [done[f"r{place}"].outputs[0].finish_reason for place in range(9)] == ["length"] * 7 + [
        "abort"
    ] * 2
    assert_idle(llm)


def test_every_completion_of_a_request(llm):
    engine = llm.llm_engine
    engine.add_request("a", [20, 30, 40], SamplingParams(n=6, seed=1, max_tokens=30, ignore_eos=True))
    for _ in range(3):
        engine.step()
    assert engine.abort_request("a") == 1
    (output,) = run_to_end(engine).values()
    assert [sample.finish_reason for sample in output.outputs] == ["abort"] * 6
    assert [sample.index for sample in output.outputs] == list(range(6))
    assert_idle(llm)


def test_an_aborted_id_can_be_used_again(llm):
    engine = llm.llm_engine
    engine.add_request("a", [20, 30], greedy(4))
    with pytest.raises(ValueError, match="'a' is still running"):
        engine.add_request("a", [20, 30], greedy(4))
    engine.abort_request("a")
    engine.step()
    engine.add_request("a", [20, 30], greedy(4))
    assert run_to_end(engine)["a"].outputs[0].finish_reason == "length"
    assert_idle(llm)


def test_from_another_thread(llm, seed):
    """Every request ends exactly once, aborted or not, whenever the abort comes."""
    order = random.Random(seed)
    engine, names = llm.llm_engine, [f"r{place}" for place in range(60)]
    for place, name in enumerate(names):
        params = SamplingParams(seed=place, max_tokens=order.randrange(1, 20), ignore_eos=True, stop="zq")
        engine.add_request(name, list(prompt_of(1 + place)), params, stream=place % 3 == 0)
    aborted, stop = [], threading.Event()

    def abort() -> None:
        while not stop.is_set():
            aborted.append(engine.abort_request(order.choice(names)))
            time.sleep(order.random() * 0.02)

    thread = threading.Thread(target=abort)
    thread.start()
    try:
        done = run_to_end(engine)
    finally:
        stop.set()
        thread.join()
    assert sorted(done) == sorted(names)
    reasons = [output.outputs[0].finish_reason for output in done.values()]
    assert set(reasons) == {"abort", "length"}
    assert reasons.count("abort") <= sum(aborted)
    assert_idle(llm)
