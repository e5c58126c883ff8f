"""Log-probabilities: one meaning per mode, equal to teacher-forced scoring and to the model's own logits."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from deepinfer.outputs import IMPOSSIBLE
from deepinfer.sampling_params import SamplingParams
from tests.support.engines import facts, generate, greedy, make_llm, prompt_of
from tests.support.models import make_harness

PROMPT = list(prompt_of(9))
VOCAB = 4096
INTERNAL = [14, 15]  # image place and draft noise: never sampled

# Options that shape the distribution without looking at the output.
OPTIONS = {
    "plain": {},
    "cold": {"temperature": 0.5},
    "greedy": {"temperature": 0.0},
    "cut": {"temperature": 1.5, "top_k": 40, "top_p": 0.95, "min_p": 0.001},
    "edited": {"temperature": 2.0, "logit_bias": {300: 4.0, 29: -math.inf}},
    "allowed": {"temperature": 3.0, "allowed_token_ids": range(20, 120)},
}


@pytest.fixture(scope="module")
def engines(llm):
    """Mode -> engine."""
    with (
        make_llm(logprobs_mode="temperature", max_num_seqs=8) as temperature,
        make_llm(logprobs_mode="processed", max_num_seqs=8) as processed,
    ):
        yield {"raw": llm, "temperature": temperature, "processed": processed}


def options_of(name, **more):
    return SamplingParams(
        **{"seed": 11, "max_tokens": 5, "ignore_eos": True, "logprobs": 2, **OPTIONS[name], **more}
    )


def model_logits(tokens):
    """[n, vocab] float64, from the model without an engine."""
    harness = make_harness("v41-tiny")
    return harness.prefill(harness.add(tokens), outputs="all").double()


def expected_scores(logits, params, mode):
    """[n, vocab] float64 log-probabilities by the definition of a mode, without ties."""
    if mode == "raw":
        return logits.log_softmax(-1)
    scores = logits.clone()
    scores[:, INTERNAL] = -torch.inf
    for token, bias in params.logit_bias:
        scores[:, token] += bias
    if params.allowed_token_ids is not None:
        allowed = torch.zeros(VOCAB, dtype=torch.bool)
        allowed[list(params.allowed_token_ids)] = True
        scores[:, ~allowed] = -torch.inf
    if params.is_greedy and mode == "processed":
        best = torch.full_like(scores, -torch.inf)
        return best.scatter(-1, scores.argmax(-1, keepdim=True), 0.0)
    scores = (scores if params.is_greedy else scores / params.temperature).log_softmax(-1)
    if mode == "temperature":
        return scores
    keep = scores >= scores.amax(-1, keepdim=True) + math.log(params.min_p or 1e-300)
    scores = scores.masked_fill(~keep, -torch.inf)
    if params.top_k > 0:
        scores = scores.masked_fill(scores < scores.topk(params.top_k).values[:, -1:], -torch.inf)
    if params.top_p < 1:
        order = scores.softmax(-1).sort(-1, descending=True)
        dropped = order.values.cumsum(-1) - order.values > params.top_p
        scores = scores.masked_fill(torch.zeros_like(dropped).scatter(-1, order.indices, dropped), -torch.inf)
    return scores.log_softmax(-1)


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("mode", ["raw", "temperature", "processed"])
def test_modes(engines, mode, name):
    llm, params = engines[mode], options_of(name)
    sample = generate(llm, PROMPT, params)[0].outputs[0]
    whole = PROMPT + sample.token_ids

    # The same numbers by scoring the text, and by forcing it under another seed.
    scored = generate(llm, whole, params.clone(max_tokens=1, prompt_logprobs=2))[0]
    assert scored.prompt_token_logprobs[len(PROMPT) - 1 :] == sample.token_logprobs
    assert scored.prompt_logprobs[len(PROMPT) :] == sample.logprobs
    forced = generate(llm, PROMPT, params.clone(golden_token_ids=sample.token_ids, seed=5))[0].outputs[0]
    assert (forced.token_ids, forced.logprobs) == (sample.token_ids, sample.logprobs)
    assert forced.token_logprobs == sample.token_logprobs

    # And by the definition.
    expected = expected_scores(model_logits(whole[:-1]), params, mode)
    values = expected.gather(-1, torch.tensor(whole[1:])[:, None])[:, 0].clamp(min=IMPOSSIBLE)
    assert scored.prompt_token_logprobs == pytest.approx(values.tolist(), rel=1e-5, abs=1e-5)
    best = expected.topk(2)
    for place, position in enumerate(scored.prompt_logprobs[1:]):
        entries = [entry for entry in position.values() if entry.rank <= 2 and entry.logprob > IMPOSSIBLE]
        want = [(i, v) for i, v in zip(best.indices[place], best.values[place], strict=True) if v > -math.inf]
        got = sorted(entries, key=lambda entry: entry.rank)
        assert [entry.logprob for entry in got] == pytest.approx(
            [float(v) for _, v in want], rel=1e-5, abs=1e-5
        )
        assert {int(i) for i, _ in want} <= set(position)
        rank = int((expected[place] > expected[place, whole[place + 1]]).sum()) + 1
        entry = position[whole[place + 1]]
        if entry.logprob > IMPOSSIBLE:
            assert abs(entry.rank - rank) <= 1, "two that round alike may stand either way"


def test_raw_values_ignore_the_parameters(engines):
    """The law is the model's, whatever is sampled from."""
    tokens = [50, 60, 70]
    rows = []
    for name in OPTIONS:
        params = options_of(name, golden_token_ids=tokens, max_tokens=3)
        rows.append(generate(engines["raw"], PROMPT, params)[0].outputs[0].token_logprobs)
    assert all(row == rows[0] for row in rows)


def test_impossible_tokens(engines):
    """A forced token that could not be drawn: a finite number, and the sum is one too."""
    params = options_of("allowed", golden_token_ids=[500, 50], max_tokens=2)
    for mode in ("temperature", "processed"):
        sample = generate(engines[mode], PROMPT, params)[0].outputs[0]
        assert sample.token_logprobs[0] == IMPOSSIBLE < sample.token_logprobs[1]
        assert sample.cumulative_logprob == pytest.approx(IMPOSSIBLE + sample.token_logprobs[1])


def test_processed_values_sum_to_one(engines):
    sample = generate(engines["processed"], PROMPT, options_of("cut", logprobs=40))[0].outputs[0]
    for position in sample.logprobs:
        assert 1 <= len(position) <= 40
        assert math.fsum(math.exp(entry.logprob) for entry in position.values()) == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("count", [None, False, True, 0, 1, 3, 1000])
def test_how_many(llm, count):
    output = generate(llm, PROMPT, options_of("plain", logprobs=count, prompt_logprobs=count, max_tokens=2))[
        0
    ]
    sample = output.outputs[0]
    fields = (sample.logprobs, sample.token_logprobs, sample.cumulative_logprob)
    fields += (output.prompt_logprobs, output.prompt_token_logprobs)
    if count is None or count is False:
        assert fields == (None,) * 5
        return
    number = 0 if count is True else count
    assert output.prompt_logprobs[0] is None and len(output.prompt_logprobs) == len(PROMPT)
    assert len(output.prompt_token_logprobs) == len(PROMPT) - 1
    tokens = PROMPT[1:] + sample.token_ids
    positions = output.prompt_logprobs[1:] + sample.logprobs
    values = output.prompt_token_logprobs + sample.token_logprobs
    assert sample.cumulative_logprob == math.fsum(sample.token_logprobs)
    for token, value, position in zip(tokens, values, positions, strict=True):
        assert next(iter(position)) == token and position[token].logprob == value <= 0
        assert len(position) == max(1, number + (position[token].rank > number))
        entries = sorted(position.values(), key=lambda entry: entry.rank)
        assert [entry.rank for entry in entries[:number]] == list(range(1, number + 1))
        assert all(a.logprob >= b.logprob for a, b in itertools.pairwise(entries))
        others = list(position.values())[1:]
        assert others == sorted(others, key=lambda entry: entry.rank), "the chosen one, then by rank"
        for each, entry in position.items():
            assert entry.decoded_token == llm.get_tokenizer().decode([each])


def test_asking_changes_no_token(llm):
    params = options_of("plain", logprobs=None)
    want = generate(llm, PROMPT, params)[0].outputs[0].token_ids
    for options in ({"logprobs": 5}, {"prompt_logprobs": 1}, {"logprobs": True, "prompt_logprobs": True}):
        assert generate(llm, PROMPT, params.clone(**options))[0].outputs[0].token_ids == want


@pytest.mark.parametrize("mode", ["raw", "temperature", "processed"])
def test_alone_and_in_a_batch(engines, mode):
    llm = engines[mode]
    prompts = [list(prompt_of(length)) for length in (1, 131, 2, 64, 7, 9)]
    params = [options_of(name, max_tokens=3, prompt_logprobs=1) for name in OPTIONS]
    together = facts(generate(llm, prompts, params))
    assert together == [facts(generate(llm, *row))[0] for row in zip(prompts, params, strict=True)]


def test_several_samples_share_the_prompts_scores(llm):
    output = generate(llm, PROMPT, options_of("plain", n=3, prompt_logprobs=1, max_tokens=2))[0]
    alone = generate(llm, PROMPT, options_of("plain", prompt_logprobs=1, max_tokens=2))[0]
    assert output.prompt_logprobs == alone.prompt_logprobs
    assert output.outputs[0] == alone.outputs[0]
    assert [len(sample.token_logprobs) for sample in output.outputs] == [2] * 3


def test_a_prompt_of_one_token(llm):
    output = generate(llm, [7], greedy(1, prompt_logprobs=2))[0]
    assert output.prompt_logprobs == [None] and output.prompt_token_logprobs == []


def test_penalties_do_not_touch_the_prompts_scores(engines):
    """They look at the output; the output's own values see them, except in the raw mode."""
    golden = {"golden_token_ids": [50, 50, 50], "max_tokens": 3, "prompt_logprobs": 0}
    for mode, llm in engines.items():
        plain = generate(llm, PROMPT, options_of("plain", **golden))[0]
        options = {"repetition_penalty": 1.5, "frequency_penalty": 1.0, "presence_penalty": 0.5}
        changed = generate(llm, PROMPT, options_of("plain", **golden, **options))[0]
        assert changed.prompt_token_logprobs == plain.prompt_token_logprobs
        same = changed.outputs[0].token_logprobs == plain.outputs[0].token_logprobs
        assert same == (mode == "raw")
