"""Run-time faults end the row they happen in, with a kind and what it has so far; the others go on."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from deepinfer.sampling_params import SamplingParams
from deepinfer.settings import Settings
from tests.engine.faults import faulty
from tests.support.engines import PLAIN_STEPS, assert_idle, facts, generate, make_llm, prompt_of

PROMPTS = [prompt_of(length) for length in (3, 70, 9, 130, 64)]
PARAMS = [
    SamplingParams(temperature=place % 2, seed=place, max_tokens=6, ignore_eos=True, logprobs=1)
    for place in range(len(PROMPTS))
]


@pytest.fixture(scope="module", params=["plain", "drafting"])
def llm(request):
    settings = {"plain": PLAIN_STEPS, "drafting": Settings(use_async_scheduling=True)}[request.param]
    with make_llm(settings=settings) as llm:
        yield llm


def breaking(call: int, row: int, value: float) -> Callable[[Tensor], None]:
    """Spoils one element of one row of the `call`-th logits."""
    calls = iter(range(1000))

    def spoil(logits: Tensor) -> None:
        if next(calls) == call:
            logits[row, 17] = value

    return spoil


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize(("call", "row"), [(0, 0), (0, 4), (1, 0)])
def test_broken_logits_end_one_row(llm, value, call, row):
    want = generate(llm, PROMPTS, PARAMS)
    with faulty(llm, on_logits=breaking(call, row, value)):
        outputs = generate(llm, PROMPTS, PARAMS)
    ended = [place for place, output in enumerate(outputs) if output.outputs[0].finish_reason == "error"]
    assert len(ended) == 1
    for place, (output, whole) in enumerate(zip(outputs, want, strict=True)):
        if place not in ended:
            assert facts([output]) == facts([whole])
            continue
        sample = output.outputs[0]
        assert sample.error.kind == "numerics" and "NaN" in sample.error.message
        assert output.error is sample.error
        count = len(sample.token_ids)
        assert count < 6 and sample.token_ids == whole.outputs[0].token_ids[:count]
        assert sample.token_logprobs == whole.outputs[0].token_logprobs[:count]
    assert facts(generate(llm, PROMPTS, PARAMS)) == facts(want)


def test_logits_of_minus_infinity(llm):
    def spoil(logits: Tensor) -> None:
        logits[1:] = -math.inf

    with faulty(llm, on_logits=spoil):
        kinds = {output.error and output.error.kind for output in generate(llm, PROMPTS[:2], PARAMS[:2])}
    assert kinds == {None, "numerics"}


def test_a_broken_prompt_score_ends_the_request(llm):
    def spoil(logits: Tensor) -> None:
        if logits.shape[0] > 2:
            logits[1] = math.nan

    with faulty(llm, on_logits=spoil):
        output = generate(llm, [PROMPTS[1]], SamplingParams(prompt_logprobs=1))[0]
    assert output.error.kind == "numerics" and output.outputs[0].token_ids == []
    assert len(output.prompt_token_logprobs) == 1, "those before the broken one"


def test_masks_that_leave_nothing(llm):
    masked = SamplingParams(allowed_token_ids=[50], logit_bias={50: -math.inf})
    alone = generate(llm, [PROMPTS[0], PROMPTS[2]], [PARAMS[0], PARAMS[2]])
    outputs = generate(llm, PROMPTS[:3], [PARAMS[0], masked, PARAMS[2]])
    assert outputs[1].error.kind == "no_token" and outputs[1].outputs[0].token_ids == []
    assert facts([outputs[0], outputs[2]]) == facts(alone)


def test_masks_that_leave_nothing_later(llm):
    """A single allowed token that min_tokens bans as a stop token."""
    params = SamplingParams(allowed_token_ids=[50], stop_token_ids=[50], min_tokens=2, max_tokens=4)
    assert generate(llm, PROMPTS[:1], params)[0].error.kind == "no_token"


@pytest.mark.parametrize("step", [0, 1, 3])
def test_a_crash_of_the_forward_raises_and_leaves_the_engine_usable(llm, step):
    calls = iter(range(1000))

    def crash(forward, batch, caches, **options):
        if next(calls) == step:
            raise MemoryError("no room")
        return forward(batch, caches, **options)

    want = facts(generate(llm, PROMPTS, PARAMS))
    with faulty(llm, on_forward=crash), pytest.raises(MemoryError, match="no room"):
        llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    assert_idle(llm)
    assert facts(generate(llm, PROMPTS, PARAMS)) == want


def test_the_engine_goes_on_after_a_crash():
    """With the step loop nothing is lost: the requests are still there."""
    calls = iter(range(1000))

    def crash(forward, batch, caches, **options):
        if next(calls) in (0, 2):
            raise RuntimeError("broken")
        return forward(batch, caches, **options)

    with make_llm() as llm:
        want = facts(generate(llm, PROMPTS, PARAMS))
        engine = llm.llm_engine
        for place, (prompt, params) in enumerate(zip(PROMPTS, PARAMS, strict=True)):
            engine.add_request(f"r{place}", list(prompt), params)
        done, crashes = {}, 0
        with faulty(llm, on_forward=crash):
            while engine.has_unfinished_requests():
                try:
                    done |= {output.request_id: output for output in engine.step()}
                except RuntimeError:
                    crashes += 1
        assert crashes == 2
        assert facts([done[f"r{place}"] for place in range(len(PROMPTS))]) == want
        engine.settle()
        assert_idle(llm)


def test_torch_state_is_as_before(llm):
    """A fault inside the forward leaves no inference mode behind."""

    def crash(*_: object, **__: object) -> None:
        raise RuntimeError("broken")

    with faulty(llm, on_forward=crash), pytest.raises(RuntimeError, match="broken"):
        llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    assert not torch.is_inference_mode_enabled()
