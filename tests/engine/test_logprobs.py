"""Log-probabilities: what they mean in each mode, and that scoring and generating agree bit by bit."""

from __future__ import annotations

import functools
import math

import pytest
import torch

from deepinfer.entrypoints.llm import LLM
from deepinfer.outputs import Logprob, RequestOutput
from deepinfer.sampling_params import SamplingParams
from tests.support.engines import generate, make_llm, prompt_of
from tests.support.models import make_harness

MODES = ("raw", "temperature", "processed")
STYLES = {
    "greedy": {"temperature": 0},
    "random": {"temperature": 1.0, "seed": 5},
    "warm": {"temperature": 0.7, "top_p": 0.9, "seed": 6},
    "cut": {"temperature": 1.4, "top_k": 40, "min_p": 0.01, "seed": 7},
    "biased": {"temperature": 1.1, "seed": 8, "logit_bias": {40: 2.0, 41: float("-inf")}},
    "allowed": {"temperature": 2.0, "seed": 9, "allowed_token_ids": range(20, 90)},
}
PROMPTS = [list(prompt_of(length, 3)) for length in (2, 70, 130)]


@functools.cache
def engine(mode: str) -> LLM:
    return make_llm(logprobs_mode=mode, max_num_seqs=8)


@pytest.fixture(scope="module", autouse=True)
def close_engines():
    yield
    for mode in MODES:
        engine(mode).close()
    engine.cache_clear()


@functools.cache
def generated(mode: str, style: str) -> list[RequestOutput]:
    params = SamplingParams(**STYLES[style], max_tokens=12, ignore_eos=True, logprobs=3)
    return generate(engine(mode), PROMPTS, params)


def whole(output: RequestOutput) -> list[int]:
    return output.prompt_token_ids + output.outputs[0].token_ids


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("mode", MODES)
def test_prompt_scores_equal_those_of_generating(mode, style):
    """The output, given again as part of a prompt under the same parameters."""
    outputs = generated(mode, style)
    params = SamplingParams(**STYLES[style], max_tokens=1, prompt_logprobs=3)
    for output, scored in zip(
        outputs, generate(engine(mode), [whole(each) for each in outputs], params), strict=True
    ):
        start, sample = len(output.prompt_token_ids), output.outputs[0]
        assert scored.prompt_token_logprobs[start - 1 :] == sample.token_logprobs
        assert scored.prompt_logprobs[start:] == sample.logprobs
        assert scored.prompt_logprobs[0] is None
        assert len(scored.prompt_logprobs) == len(scored.prompt_token_logprobs) + 1 == start + 12


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("mode", MODES)
def test_forced_tokens_have_the_scores_of_chosen_ones(mode, style):
    for output in generated(mode, style):
        sample = output.outputs[0]
        params = SamplingParams(
            **STYLES[style],
            max_tokens=12,
            ignore_eos=True,
            logprobs=3,
            golden_token_ids=[token if place % 3 else -1 for place, token in enumerate(sample.token_ids)],
        )
        again = generate(engine(mode), [output.prompt_token_ids], params)[0].outputs[0]
        assert again == sample


@pytest.mark.parametrize("mode", MODES)
def test_forced_tokens_that_nobody_would_choose(mode):
    """Scored as part of a prompt and as forced output; tokens outside of the truncation are impossible."""
    params = SamplingParams(**STYLES["warm"], max_tokens=1, prompt_logprobs=2)
    forced = params.clone(
        max_tokens=69, prompt_logprobs=None, logprobs=2, ignore_eos=True, golden_token_ids=PROMPTS[1][1:]
    )
    (scored,) = generate(engine(mode), [PROMPTS[1]], params)
    (output,) = generate(engine(mode), [PROMPTS[1][:1]], forced)
    assert output.outputs[0].token_ids == PROMPTS[1][1:]
    assert output.outputs[0].token_logprobs == scored.prompt_token_logprobs
    assert output.outputs[0].logprobs == scored.prompt_logprobs[1:]
    assert (min(scored.prompt_token_logprobs) == -9999) == (mode == "processed")


@pytest.mark.parametrize("model", ["v41-tiny", "tiny-quant"])
def test_raw_scores_are_those_of_the_model(model):
    """Against the logits of the forward alone."""
    prompt = list(prompt_of(40, 1))
    harness = make_harness(model, num_seqs=1)
    logits = harness.prefill(harness.add(prompt), outputs="all").double()
    expected = torch.log_softmax(logits, -1)
    with make_llm(model, max_num_seqs=2, max_num_batched_tokens=16) as llm:
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=4, logprobs=4)
        (output,) = generate(llm, [prompt], params)
    places = [*output.prompt_logprobs[1:], *output.outputs[0].logprobs]
    tokens = [*prompt[1:], *output.outputs[0].token_ids]
    assert output.outputs[0].token_ids == [int(logits[-1].argmax())]
    for row, (token, place) in enumerate(zip(tokens, places, strict=True)):
        order = expected[row].argsort(descending=True, stable=True).tolist()
        assert next(iter(place)) == token and set(place) == {token, *order[:4]}
        for other, entry in place.items():
            assert entry.logprob == pytest.approx(float(expected[row, other]), abs=1e-5)
            assert entry.rank == order.index(other) + 1


@pytest.mark.parametrize("style", ["warm", "cut", "biased", "allowed"])
def test_the_meaning_of_each_mode(style):
    """From the raw values of all likely tokens: temperature divides, truncation renormalises."""
    options = STYLES[style]
    params = SamplingParams(**options, max_tokens=4, ignore_eos=True, logprobs=1000)
    (raw,), (warm,), (cut,) = (generate(engine(mode), PROMPTS[1:2], params) for mode in MODES)
    assert raw.outputs[0].token_ids == warm.outputs[0].token_ids == cut.outputs[0].token_ids
    for row in range(4):
        values = {token: entry.logprob for token, entry in raw.outputs[0].logprobs[row].items()}
        edited = {
            token: value + options.get("logit_bias", {}).get(token, 0.0) for token, value in values.items()
        }
        if "allowed_token_ids" in options:
            edited = {
                token: value for token, value in edited.items() if token in options["allowed_token_ids"]
            }
        found = warm.outputs[0].logprobs[row]
        some = [token for token in edited if token in found and edited[token] > -1e3]
        assert len(some) > 10
        first = some[0]
        for token in some:  # differences, because the sum over all tokens is not known here
            difference = (edited[token] - edited[first]) / options["temperature"]
            assert found[token].logprob - found[first].logprob == pytest.approx(difference, abs=2e-4)
        kept = cut.outputs[0].logprobs[row]
        if style != "biased":  # its whole vocabulary stays
            assert len(kept) < 1000
            assert sum(math.exp(entry.logprob) for entry in kept.values()) == pytest.approx(1, abs=1e-4)
        if style == "cut":
            assert len(kept) <= 40
        for token in kept:
            difference = found[token].logprob - found[first].logprob
            if first in kept and token in found:
                assert kept[token].logprob - kept[first].logprob == pytest.approx(difference, abs=2e-4)


def test_greedy_processed_values_are_certain():
    for output in generated("processed", "greedy"):
        assert output.outputs[0].token_logprobs == [0.0] * 12
        assert all(len(place) == 1 for place in output.outputs[0].logprobs)


@pytest.mark.parametrize("asked", [None, False, True, 0, 1, 5])
def test_what_was_asked_for(asked):
    params = SamplingParams(
        temperature=0, max_tokens=3, ignore_eos=True, logprobs=asked, prompt_logprobs=asked
    )
    (output,) = generate(engine("raw"), [PROMPTS[1]], params)
    sample = output.outputs[0]
    if asked is None or asked is False:
        assert sample.logprobs is sample.token_logprobs is sample.cumulative_logprob is None
        assert output.prompt_logprobs is output.prompt_token_logprobs is None
        return
    assert sample.cumulative_logprob == pytest.approx(sum(sample.token_logprobs))
    for token, value, place in zip(sample.token_ids, sample.token_logprobs, sample.logprobs, strict=True):
        assert next(iter(place)) == token and place[token].logprob == value
        assert len(place) == max(1, int(asked) if asked is not True else 1)  # the choice is the most likely
        ranks = [entry.rank for entry in place.values()]
        assert ranks == list(range(1, len(place) + 1))
    for token, place in zip(PROMPTS[1][1:], output.prompt_logprobs[1:], strict=True):
        assert isinstance(place[token], Logprob)
        assert len(place) - int(asked) in (0, 1) or asked is True


def test_a_prompt_of_one_token():
    (output,) = generate(engine("raw"), [[20]], SamplingParams(max_tokens=1, prompt_logprobs=2))
    assert output.prompt_logprobs == [None] and output.prompt_token_logprobs == []


def test_prompt_scores_do_not_depend_on_chunks_or_rows():
    prompts = [list(prompt_of(length, 4)) for length in (9, 300, 128, 5)]
    params = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=2)
    want = [generate(engine("raw"), [prompt], params)[0] for prompt in prompts]
    with make_llm(max_num_seqs=4, max_num_batched_tokens=37) as llm:
        for output, alone in zip(generate(llm, prompts, params), want, strict=True):
            assert output.prompt_logprobs == alone.prompt_logprobs
            assert output.outputs == alone.outputs


def test_several_completions_score_the_prompt_once(monkeypatch):
    """Whichever completion ends first."""
    params = SamplingParams(n=6, seed=3, max_tokens=9, prompt_logprobs=1, stop_token_ids=range(16, 500))
    (output,) = generate(engine("raw"), [PROMPTS[1]], params)
    lengths = [len(sample.token_ids) for sample in output.outputs]
    assert min(lengths) < lengths[0], "another one ended before the first"
    (alone,) = generate(engine("raw"), [PROMPTS[1]], params.clone(n=1))
    assert output.prompt_logprobs == alone.prompt_logprobs and len(output.prompt_logprobs) == 70
