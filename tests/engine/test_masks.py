"""Tokens that are never sampled, whoever asks: the blacklist, ids without a text, the engine's own ids."""

from __future__ import annotations

from unittest import mock

import pytest

from deepinfer.engine import parts
from deepinfer.entrypoints.llm import LLM
from deepinfer.sampling_params import SamplingParams
from deepinfer.settings import Settings
from tests.support.engines import facts, generate, greedy, make_llm, prompt_of
from tests.support.paths import V41_TINY

PROMPTS = [list(prompt_of(length)) for length in (3, 9, 20)]


def wanting(token: int, **options) -> SamplingParams:
    """Parameters under which `token` is the most likely one, whatever the model says."""
    return SamplingParams(logit_bias={token: 1e4}, max_tokens=4, ignore_eos=True, **options)


def tokens_of(outputs) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture(scope="module")
def usual():
    with make_llm(max_num_seqs=8) as llm:
        yield llm


def test_the_bias_would_win(usual):
    assert tokens_of(generate(usual, PROMPTS, wanting(100))) == [[100] * 4] * 3


def test_the_blacklist(usual, monkeypatch):
    """Also for the first token, which a prefill samples; the others are as if it had been banned by hand."""
    monkeypatch.setenv("DEEPINFER_DECODE_TOKEN_BLACKLIST", "5..9,100,4000..4095")
    banned = [*range(5, 10), 100, *range(4000, 4096)]
    by_hand = SamplingParams(
        logit_bias={token: float("-inf") for token in banned}, temperature=1.3, seed=4, max_tokens=6
    )
    plain = SamplingParams(temperature=1.3, seed=4, max_tokens=6)
    with make_llm(settings=Settings.from_env(), max_num_seqs=8) as llm:
        for token in (5, 9, 100, 4000, 4095):
            for style in ({"temperature": 0}, {"temperature": 1.0, "seed": 1}):
                assert not {token} & {
                    t for row in tokens_of(generate(llm, PROMPTS, wanting(token, **style))) for t in row
                }
        assert tokens_of(generate(llm, PROMPTS, wanting(4))) == [[4] * 4] * 3
        assert tokens_of(generate(llm, PROMPTS, plain)) == tokens_of(generate(usual, PROMPTS, by_hand))
        only = SamplingParams(allowed_token_ids=[100, 4000], max_tokens=2)
        assert generate(llm, PROMPTS[:1], only)[0].error.kind == "no_token"
        assert generate(llm, [[100, 5]], greedy(1))[0].error is None, "prompts may hold them"
        forced = greedy(2, golden_token_ids=[100, 100])
        assert tokens_of(generate(llm, PROMPTS[:1], forced)) == [[100, 100]], "forced is not sampled"


@pytest.mark.parametrize(
    ("text", "message"),
    [("4000..5000", "token 5000; the vocabulary ends at 4095"), ("0..4095", "nothing could be sampled")],
)
def test_a_blacklist_that_cannot_work(monkeypatch, text, message):
    monkeypatch.setenv("DEEPINFER_DECODE_TOKEN_BLACKLIST", text)
    with pytest.raises(ValueError, match=message):
        make_llm(settings=Settings.from_env())


def test_ids_of_the_engine_are_never_sampled(usual):
    internal = usual.get_tokenizer().internal_ids
    assert len(internal) == 2
    for token in internal:
        assert all(token not in row for row in tokens_of(generate(usual, PROMPTS, wanting(token, seed=3))))


def test_ids_without_a_text_are_never_sampled():
    """A tokenizer that lacks the last hundred ids of the model's vocabulary."""
    load = parts.load_tokenizer

    def shorter(*args, **kwargs):
        tokenizer = load(*args, **kwargs)
        tokenizer.undecodable_ids = tuple(range(3996, 4096))
        return tokenizer

    with mock.patch.object(parts, "load_tokenizer", shorter), make_llm(max_num_seqs=4) as llm:
        for token in (3996, 4095):
            for style in ({"temperature": 0}, {"temperature": 1.0, "seed": 1}):
                assert token not in tokens_of(generate(llm, PROMPTS[:1], wanting(token, **style)))[0]
        assert tokens_of(generate(llm, PROMPTS[:1], wanting(3995, seed=1))) == [[3995] * 4]


def test_forced_top_k(usual, monkeypatch):
    hot = SamplingParams(temperature=5.0, seed=7, max_tokens=12, ignore_eos=True)
    monkeypatch.setenv("DEEPINFER_SAMPLER_FORCE_TOPK", "3")
    with make_llm(settings=Settings.from_env(), max_num_seqs=8, logprobs_mode="processed") as llm:
        # What every request may ask for by itself, and less than it asks for.
        for given, own in ((hot, 3), (hot.clone(top_k=50), 3), (hot.clone(top_k=2), 2)):
            want = generate(usual, PROMPTS, hot.clone(top_k=own))
            assert tokens_of(generate(llm, PROMPTS, given)) == tokens_of(want)
        (output,) = generate(llm, PROMPTS[:1], hot.clone(logprobs=8))
        for place in output.outputs[0].logprobs:
            assert len(place) == 3, "log-probabilities live inside the k best"
    monkeypatch.setenv("DEEPINFER_SAMPLER_FORCE_TOPK", "1")
    with make_llm(settings=Settings.from_env(), max_num_seqs=8) as llm:
        best = generate(usual, PROMPTS, greedy(12))
        assert tokens_of(generate(llm, PROMPTS, hot)) == tokens_of(best)
        assert facts(generate(llm, PROMPTS, greedy(12))) == facts(best)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("DEEPINFER_DECODE_TOKEN_BLACKLIST", "7..3", "strictly increasing"),
        ("DEEPINFER_SAMPLER_FORCE_TOPK", "-1", "an integer >= 0"),
        ("DEEPINFER_SAMPLER_FORCE_TOPK", "many", "an integer >= 0"),
        ("DEEPINFER_BATCH_INVARIENT", "1", "nearest one is DEEPINFER_BATCH_INVARIANT"),
        ("DEEPINFER_NUM_STATE_SLOTS_RATIO", "0.5", "a number >= 1"),
        ("DEEPINFER_USE_NEXTN_DECODE", "6", "trained for blocks of 5 tokens"),
    ],
)
def test_bad_variables_stop_the_engine(monkeypatch, name, text, message):
    monkeypatch.setenv(name, text)
    with pytest.raises(ValueError, match=f"(?s){name}.*{message}|{message}"):
        LLM(str(V41_TINY))
