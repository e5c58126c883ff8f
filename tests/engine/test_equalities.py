"""Whole-system equalities: how a request is run changes neither its tokens nor its log-probabilities.

The expected outcome is that of the request alone with its prompt in one piece.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from deepinfer.ops import cpu
from deepinfer.sampling_params import SamplingParams
from tests.engine.equalities import (
    LENGTHS,
    Case,
    Outcome,
    cases_of,
    differences,
    run_alone,
    run_by_decoding,
    run_together,
)
from tests.support.engines import PLAIN_STEPS, assert_idle, facts, generate, make_cold_llm, prompt_of, watched

MODELS = ("v41-tiny", "tiny-quant")


@functools.cache
def whole(model: str):
    """An engine that splits no prompt, with room for 32 of them in one step."""
    return make_cold_llm(model, max_num_batched_tokens=1 << 14)


@functools.cache
def plain(model: str):
    """An engine with one token per decode step, which makes forced tokens cheap."""
    return make_cold_llm(model, settings=PLAIN_STEPS)


_alone: dict[tuple[str, Case], Any] = {}


def expected(model: str, cases: Sequence[Case]) -> Outcome:
    """Each case alone; run once."""
    missing = [case for case in cases if (model, case) not in _alone]
    _alone.update({(model, case): found for case, found in zip(missing, run_alone(whole(model), missing))})
    return [_alone[model, case] for case in cases]


def in_turn(cases: Sequence[Case], first: int) -> list[Case]:
    """One of the two cases of each length, greedy and sampled in turn."""
    return [case for place, case in enumerate(cases) if place % 2 == (place // 2 + first) % 2]


def check(model: str, cases: Sequence[Case], actual: Outcome) -> None:
    wrong = differences(cases, actual, expected(model, cases))
    assert not wrong, "\n".join(wrong)


@pytest.fixture(scope="module", autouse=True)
def close_engines():
    yield
    for engine in (whole, plain):
        for model in MODELS:
            assert_idle(engine(model))
            engine(model).close()
        engine.cache_clear()
    _alone.clear()


@pytest.mark.parametrize("model", MODELS)
def test_the_outcomes_are_not_all_the_same(model):
    cases = cases_of(LENGTHS)
    tokens = [tuple(tokens) for tokens, _ in expected(model, cases)]
    assert len(set(tokens)) > len(tokens) // 2


@pytest.mark.parametrize("model", MODELS)
def test_alone_equals_in_a_batch_of_32_mixed_lengths(model):
    cases = cases_of(LENGTHS)
    order = random.sample(range(len(cases)), len(cases))
    odd = [
        SamplingParams(temperature=1.3, top_k=5, min_p=0.01, seed=1, max_tokens=7, logprobs=20),
        SamplingParams(repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.5, max_tokens=6),
        SamplingParams(logit_bias={7: 3.0, 9: float("-inf")}, max_tokens=5, prompt_logprobs=3),
        SamplingParams(allowed_token_ids=[40, 50, 60], min_tokens=2, stop_token_ids=[50], max_tokens=9),
        SamplingParams(n=2, stop="e", max_tokens=4),
    ]
    neighbours = [(prompt_of(11 * place + 1, 9), param) for place, param in enumerate(odd)]
    rows = [(cases[place].prompt, cases[place].params) for place in order]
    for place, neighbour in enumerate(neighbours):
        rows.insert(7 * place, neighbour)
    with watched(whole(model)) as core:
        outputs = whole(model).generate(
            [list(prompt) for prompt, _ in rows], [params for _, params in rows], use_tqdm=False
        )
    assert max(plan.num_seqs for plan in core.plans) == 32
    mine = [output for output, (_, params) in zip(outputs, rows, strict=True) if params not in odd]
    shuffled = [
        (output.outputs[0].token_ids, (output.outputs[0].token_logprobs, output.outputs[0].logprobs))
        for output in mine
    ]
    actual = [outcome for _, outcome in sorted(zip(order, shuffled, strict=True), key=lambda pair: pair[0])]
    check(model, cases, actual)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("chunk", [128, 129])
def test_whole_equals_chunks_of_a_block(model, chunk):
    cases = in_turn(cases_of(LENGTHS), chunk % 2)  # greedy in one of them, sampled in the other one
    with make_cold_llm(model, max_num_seqs=3, max_num_batched_tokens=chunk) as llm:
        check(model, cases, run_together(llm, cases))
        assert_idle(llm)


@pytest.mark.parametrize("model", MODELS)
def test_whole_equals_chunks_of_7(model):
    longest = 300 if model == "v41-tiny" else 258
    cases = in_turn([case for case in cases_of(LENGTHS) if case.length <= longest], 0)
    with make_cold_llm(model, max_num_seqs=1, max_num_batched_tokens=7) as llm:
        check(model, cases, run_together(llm, cases))


@pytest.mark.parametrize("model", MODELS)
def test_whole_equals_chunks_of_1(model):
    cases = in_turn(cases_of((*range(1, 10), 128, 130)), MODELS.index(model))
    with make_cold_llm(model, settings=PLAIN_STEPS, max_num_seqs=1, max_num_batched_tokens=1) as llm:
        check(model, cases, run_together(llm, cases))


@pytest.mark.parametrize("model", MODELS)
def test_whole_equals_token_by_token(model):
    cases = cases_of((*range(1, 10), 64, 128, 256, 300) if model == "v41-tiny" else (5, 129, 258))
    check(model, cases, run_by_decoding(plain(model), cases))


@pytest.mark.parametrize("model", MODELS)
def test_whole_equals_token_by_token_with_drafts(model):
    """Forced tokens refuse nearly every draft."""
    cases = in_turn(cases_of((*range(1, 10), 64, 130)), MODELS.index(model))
    check(model, cases, run_by_decoding(whole(model), cases))


@pytest.mark.parametrize("arithmetic", ["w8a8", "bfloat16", "plain"])
def test_other_arithmetics(arithmetic):
    cases = in_turn(cases_of((1, 8, 64, 129, 258)), 0)
    with make_cold_llm("v41-tiny", arithmetic=arithmetic) as llm:
        want = run_alone(llm, cases)
        assert not differences(cases, run_together(llm, cases[::-1])[::-1], want)
    with make_cold_llm("v41-tiny", settings=PLAIN_STEPS, arithmetic=arithmetic) as llm:
        short = [case for case in cases if case.length <= 129]
        assert not differences(short, run_by_decoding(llm, short), want[: len(short)])
    with make_cold_llm("v41-tiny", arithmetic=arithmetic, max_num_seqs=3, max_num_batched_tokens=18) as llm:
        assert not differences(cases, run_together(llm, cases), want)


def test_two_engines_in_one_process():
    cases = {model: cases_of((5, 64, 130, 257)) for model in MODELS}
    engines = {model: make_cold_llm(model, max_num_seqs=3, max_num_batched_tokens=100) for model in MODELS}
    running = {
        model: llm.generate_iter(
            [list(case.prompt) for case in cases[model]], [case.params for case in cases[model]]
        )
        for model, llm in engines.items()
    }
    found: dict[str, dict[int, tuple]] = {model: {} for model in MODELS}
    while running:  # a result of the one, then a result of the other
        for model in list(running):
            row, output = next(running[model], (None, None))
            if output is None:
                del running[model]
                continue
            sample = output.outputs[0]
            found[model][row] = sample.token_ids, (sample.token_logprobs, sample.logprobs)
    for model, llm in engines.items():
        check(model, cases[model], [found[model][row] for row in range(len(cases[model]))])
        assert_idle(llm)
        llm.close()


@pytest.mark.usefixtures("torch_threads")
@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_threads(num_threads):
    cases = cases_of((1, 9, 130, 257))
    want = expected("v41-tiny", cases)
    before = cpu.context().num_threads
    try:
        cpu.set_num_threads(num_threads)
        torch.set_num_threads(num_threads)
        assert not differences(cases, run_together(whole("v41-tiny"), cases), want)
        assert not differences(cases[:4], run_by_decoding(plain("v41-tiny"), cases[:4]), want[:4])
    finally:
        cpu.set_num_threads(before)


def test_prompt_scores_depend_on_no_chunk_and_no_row():
    prompts = [list(prompt_of(length, 4)) for length in (9, 300, 128, 5)]
    params = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=2)
    want = facts([generate(whole("v41-tiny"), [prompt], params)[0] for prompt in prompts])
    with make_cold_llm(max_num_seqs=4, max_num_batched_tokens=37) as llm:
        assert facts(generate(llm, prompts, params)) == want


def test_the_end_of_the_context_changes_nothing_before_it():
    """With and without room behind it; drafts do not reach beyond the end."""
    prompt = list(prompt_of(248))
    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True, logprobs=2)
    (long,) = generate(whole("v41-tiny"), [prompt], params.clone(max_tokens=20))
    with make_cold_llm(max_num_seqs=2, max_model_len=256) as llm:
        (short,) = generate(llm, [prompt], params)
    assert short.outputs[0].token_ids == long.outputs[0].token_ids[:8]
    assert short.outputs[0].logprobs == long.outputs[0].logprobs[:8]
