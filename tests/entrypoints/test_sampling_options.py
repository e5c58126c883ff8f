"""What restricts or shifts the choice of a token, end to end; and what is never chosen."""

from __future__ import annotations

import json
import math
import shutil

import numpy as np
import pytest

from deepinfer.sampling_params import SamplingParams
from deepinfer.settings import Settings
from tests.support.engines import facts, generate, greedy, make_llm, prompt_of
from tests.support.models import make_harness
from tests.support.paths import V41_TINY

PROMPT = list(prompt_of(9))
INTERNAL = {14, 15}  # image place and draft noise
ANY = {"seed": 7, "temperature": 2.0, "max_tokens": 8, "ignore_eos": True}


def run(llm, prompt=PROMPT, **options):
    return generate(llm, prompt, SamplingParams(**{**ANY, **options}))[0].outputs[0]


def logits_along(sample):
    """[n, vocab] float64: the model's logits of each output token, without an engine."""
    harness = make_harness("v41-tiny")
    whole = PROMPT + sample.token_ids
    return harness.prefill(harness.add(whole[:-1]), outputs="all")[len(PROMPT) - 1 :].double().numpy()


@pytest.fixture(scope="module")
def greedy_tokens(llm):
    return generate(llm, PROMPT, greedy(8))[0].outputs[0].token_ids


# Restrictions


@pytest.mark.parametrize(
    "options",
    [
        {"top_k": 1},
        {"top_p": 1e-9},
        {"min_p": 1.0},
        {"temperature": 1e-6},
        {"temperature": 0.0, "seed": 1},
        {"temperature": 0.0, "top_k": 50, "top_p": 0.5},
    ],
    ids=str,
)
def test_options_that_leave_the_best_token(llm, greedy_tokens, options):
    assert run(llm, **options).token_ids == greedy_tokens
    assert run(llm, temperature=2.0).token_ids != greedy_tokens


def test_top_k(llm):
    samples = [run(llm, top_k=3, logprobs=0, seed=seed, temperature=50.0) for seed in range(3)]
    ranks = {
        position[token].rank for s in samples for token, position in zip(s.token_ids, s.logprobs, strict=True)
    }
    assert ranks == {1, 2, 3}


def test_min_p(llm):
    samples = [run(llm, min_p=0.2, logprobs=1, seed=seed) for seed in range(3)]
    shares = []
    for token, position in ((t, p) for s in samples for t, p in zip(s.token_ids, s.logprobs, strict=True)):
        best = max(entry.logprob for entry in position.values())
        shares.append(math.exp((position[token].logprob - best) / ANY["temperature"]))
    assert min(shares) >= 0.2 - 1e-6 and min(shares) < 1


def test_top_p(llm):
    """The mass before each token, at its temperature, is at most top_p."""
    sample = run(llm, top_p=0.6, max_tokens=12)
    scores = logits_along(sample) / ANY["temperature"]
    for token, row in zip(sample.token_ids, scores, strict=True):
        row[list(INTERNAL)] = -np.inf
        probabilities = np.exp(row - row.max()) / np.exp(row - row.max()).sum()
        assert probabilities[row > row[token]].sum() <= 0.6 + 1e-6


def test_allowed_token_ids(llm, greedy_tokens):
    allowed = list(range(100, 140, 3))
    assert set(run(llm, allowed_token_ids=allowed, temperature=5.0).token_ids) <= set(allowed)
    first = run(llm, allowed_token_ids=allowed, temperature=0.0)
    for token, row in zip(first.token_ids, logits_along(first), strict=True):
        assert token == max(allowed, key=lambda each: row[each])
    assert run(llm, allowed_token_ids=[77]).token_ids == [77] * 8
    assert run(llm, allowed_token_ids=range(4096), temperature=0.0).token_ids == greedy_tokens


def test_logit_bias(llm, greedy_tokens):
    banned = run(llm, temperature=0.0, logit_bias=dict.fromkeys(greedy_tokens, -math.inf))
    assert not set(banned.token_ids) & set(greedy_tokens)
    for token, row in zip(banned.token_ids, logits_along(banned), strict=True):
        row[[*greedy_tokens, *INTERNAL]] = -np.inf
        assert token == row.argmax()
    for bias in (1e3, 1e30):
        assert run(llm, logit_bias={123: bias}).token_ids == [123] * 8
    assert run(llm, temperature=0.0, logit_bias=dict.fromkeys(range(300), 0.0)).token_ids == greedy_tokens
    assert run(llm, logit_bias={123: -1e30, 124: 50.0, 125: 49.0}, temperature=0.1).token_ids == [124] * 8


# Penalties


@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.7},
        {"repetition_penalty": 0.6},
        {"presence_penalty": 2.0},
        {"presence_penalty": -2.0},
        {"frequency_penalty": 1.5},
        {"frequency_penalty": -1.5, "presence_penalty": 1.0, "repetition_penalty": 1.3},
    ],
    ids=str,
)
def test_penalties(llm, options):
    """Each greedy choice, made again from the model's logits and the tokens before it; drafts or not."""
    params = greedy(16, **options)
    sample = generate(llm, PROMPT, params)[0].outputs[0]
    logits = logits_along(sample)
    for place, token in enumerate(sample.token_ids):
        output, row = sample.token_ids[:place], logits[place].copy()
        for each in {*PROMPT, *output}:
            row[each] = (
                row[each] / params.repetition_penalty
                if row[each] > 0
                else row[each] * params.repetition_penalty
            )
        for each in set(output):
            row[each] -= params.presence_penalty + params.frequency_penalty * output.count(each)
        row[list(INTERNAL)] = -np.inf
        assert row[token] >= row.max() - 1e-5, f"{place=} {token=} {row.argmax()=}"
    assert facts(generate(llm, PROMPT, params)) == facts(generate(llm, PROMPT, params))


def test_penalties_change_the_output(llm):
    """A model that is pushed to repeat itself does, and does not when it is held back."""
    pushed = {"logit_bias": {50: 12.0, 51: 11.8, 52: 11.6}}
    free = run(llm, temperature=0.0, **pushed).token_ids
    held = run(llm, temperature=0.0, frequency_penalty=2.0, presence_penalty=2.0, **pushed).token_ids
    assert len(set(free)) < len(set(held))


# Settings


def test_blacklist(llm, greedy_tokens):
    text = f"0..12,{','.join(str(token) for token in sorted(set(greedy_tokens)))}"
    settings = Settings.from_env({"DEEPINFER_DECODE_TOKEN_BLACKLIST": text})
    with make_llm(settings=settings, max_num_seqs=4) as other:
        want = run(llm, temperature=0.0, logit_bias=dict.fromkeys([*range(13), *greedy_tokens], -math.inf))
        assert run(other, temperature=0.0).token_ids == want.token_ids
        for bias in ({greedy_tokens[0]: 1e3}, dict.fromkeys(range(13), 100.0)):
            assert not set(run(other, logit_bias=bias).token_ids) & {*range(13), *greedy_tokens}
        given = run(other, golden_token_ids=greedy_tokens[:1])
        assert given.token_ids[0] == greedy_tokens[0], "forced tokens are not sampled"
        assert run(other, PROMPT + greedy_tokens).finish_reason == "length", "prompts may hold them"
        none = generate(other, PROMPT, SamplingParams(allowed_token_ids=[0, 12]))[0]
        assert none.error.kind == "no_token" and "leave no token" in none.error.message


@pytest.mark.parametrize("text", ["4096", "5..4096"])
def test_a_blacklist_beyond_the_vocabulary(text):
    settings = Settings.from_env({"DEEPINFER_DECODE_TOKEN_BLACKLIST": text})
    with pytest.raises(ValueError, match="names token 4096; the vocabulary ends at 4095"):
        make_llm(settings=settings)


def test_forced_top_k(llm, greedy_tokens):
    with make_llm(settings=Settings.from_env({"DEEPINFER_SAMPLER_FORCE_TOPK": "1"}), max_num_seqs=4) as other:
        assert run(other).token_ids == greedy_tokens
        assert run(other, top_k=50, top_p=0.9, temperature=30.0).token_ids == greedy_tokens
    with make_llm(settings=Settings.from_env({"DEEPINFER_SAMPLER_FORCE_TOPK": "4"}), max_num_seqs=4) as other:
        assert run(other).token_ids == run(llm, top_k=4).token_ids
        assert run(other, top_k=9).token_ids == run(llm, top_k=4).token_ids, "an upper bound"
        assert run(other, top_k=2).token_ids == run(llm, top_k=2).token_ids
        assert run(other, temperature=0.0).token_ids == greedy_tokens


# Ids without text


def test_internal_ids_are_never_sampled(llm):
    pushed = run(llm, logit_bias={14: 1e3, 15: 1e3}, temperature=5.0)
    assert not INTERNAL & set(pushed.token_ids)
    assert run(llm, allowed_token_ids=[14, 15]).error.kind == "no_token"


def test_ids_that_the_tokenizer_cannot_decode(tmp_path):
    """A tokenizer with fewer tokens than the model has: the rest is never sampled, by whatever request."""
    size = 3000
    for name in ("config.json", "tokenizer_config.json"):
        shutil.copy(V41_TINY / name, tmp_path)
    content = json.loads((V41_TINY / "tokenizer.json").read_text())
    vocab = {piece: i for piece, i in content["model"]["vocab"].items() if i < size}
    content["model"]["vocab"] = vocab
    content["model"]["merges"] = [pair for pair in content["model"]["merges"] if "".join(pair) in vocab]
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with make_llm(tokenizer=str(tmp_path), max_num_seqs=16) as llm:
        assert llm.get_tokenizer().undecodable_ids == tuple(range(size, 4096))
        params = [
            SamplingParams(seed=seed, temperature=5.0, max_tokens=24, ignore_eos=True) for seed in range(16)
        ]
        tokens = [
            token for output in generate(llm, [PROMPT] * 16, params) for token in output.outputs[0].token_ids
        ]
        assert len(tokens) == 16 * 24 and max(tokens) < size and len(set(tokens)) > 100
        pushed = run(llm, logit_bias=dict.fromkeys(range(size, 4096), 1000.0))
        assert max(pushed.token_ids) < size
        assert run(llm, allowed_token_ids=range(size, 4096)).error.kind == "no_token"
        given = run(llm, golden_token_ids=[4000, 466], max_tokens=2)
        assert given.token_ids == [4000, 466] and given.text == "The", "given ids have no text"
