"""Streaming: text only grows, holds no part of a character, and nothing of the prompt."""

from __future__ import annotations

import itertools

import pytest

from deepinfer.outputs import RequestOutput
from deepinfer.sampling_params import SamplingParams
from tests.support.engines import assert_idle, make_llm

TEXT = "Füchse 🦊 sagen: 你好, мир! 👩‍👩‍👧‍👦 naïve café Ωμέγα e\u0301 — fin."
PROMPT = "Tell me a secret word now"


@pytest.fixture(scope="module")
def llm():
    with make_llm(max_num_seqs=4) as llm:
        yield llm


def forced(llm, text: str = TEXT, **options) -> SamplingParams:
    """Parameters under which the output is a text's tokens."""
    tokens = llm.get_tokenizer().encode(text, add_special_tokens=False)
    return SamplingParams(temperature=0, golden_token_ids=tokens, max_tokens=len(tokens), **options)


def stream(llm, params: SamplingParams, prompt: str = PROMPT) -> list[RequestOutput]:
    """Every state of one request."""
    engine = llm.llm_engine
    engine.add_request("s", prompt, params, stream=True)
    states = []
    while engine.has_unfinished_requests():
        states += engine.step()
    engine.settle()
    assert_idle(llm)
    assert [state.finished for state in states] == [False] * (len(states) - 1) + [True]
    return states


def texts_of(states: list[RequestOutput], index: int = 0) -> list[str]:
    return [state.outputs[index].text for state in states]


def test_the_text_has_characters_of_several_tokens(llm):
    tokens = llm.get_tokenizer().encode(TEXT, add_special_tokens=False)
    pieces = [llm.get_tokenizer().decode([token]) for token in tokens]
    assert sum("\ufffd" in piece for piece in pieces) > 20


def test_text_only_grows_by_whole_characters(llm):
    states = stream(llm, forced(llm))
    texts = texts_of(states)
    assert texts[-1] == TEXT
    assert len(set(texts)) > 20, "it came in pieces"
    for before, after in itertools.pairwise(texts):
        assert after.startswith(before)
    assert not any("\ufffd" in text for text in texts)
    counts = [len(state.outputs[0].token_ids) for state in states]
    assert counts == sorted(counts)
    tokenizer = llm.get_tokenizer()
    for state in states:  # all that the tokens so far say for sure
        sure = tokenizer.decode(state.outputs[0].token_ids).rstrip("\ufffd")
        assert state.outputs[0].text == sure


def test_an_output_that_ends_inside_a_character(llm):
    tokens = llm.get_tokenizer().encode("ok 🦊", add_special_tokens=False)
    params = SamplingParams(temperature=0, golden_token_ids=tokens, max_tokens=len(tokens) - 1)
    for text in (
        texts_of(stream(llm, params))[-1],
        llm.generate(PROMPT, params, use_tqdm=False)[0].outputs[0].text,
    ):
        assert text == "ok "


def test_nothing_of_the_prompt_shows(llm):
    """Not even when the prompt ends inside a character that the output completes."""
    tokens = llm.get_tokenizer().encode("🦊 yes", add_special_tokens=False)
    params = SamplingParams(temperature=0, golden_token_ids=tokens[2:], max_tokens=len(tokens) - 2)
    engine = llm.llm_engine
    engine.add_request("s", [0, *tokens[:2]], params, stream=True)
    states = []
    while engine.has_unfinished_requests():
        states += engine.step()
    engine.settle()
    assert states[-1].outputs[0].text.endswith(" yes")
    assert "🦊" not in states[-1].outputs[0].text
    for state in stream(llm, forced(llm)):
        assert state.prompt == PROMPT and PROMPT[:4] not in state.outputs[0].text


def test_a_stop_string_is_never_shown_in_part(llm):
    states = stream(llm, forced(llm, stop=["café Ωμ", "zzz"]))
    assert states[-1].outputs[0].finish_reason == "stop"
    assert states[-1].outputs[0].stop_reason == "café Ωμ"
    assert texts_of(states)[-1] == TEXT.partition("café Ωμ")[0]
    assert not any("caf" in text for text in texts_of(states))


def test_what_is_held_back_comes_when_it_was_no_stop_string(llm):
    states = stream(llm, forced(llm, "one two thr", stop=["three"]))
    assert texts_of(states)[-1] == "one two thr" and states[-1].outputs[0].finish_reason == "length"
    assert "thr" not in "".join(texts_of(states)[:-1])


def test_states_belong_to_the_caller(llm):
    """A caller may change what it got; later states and the result are what they would be."""
    params = SamplingParams(n=3, seed=4, max_tokens=9, stop_token_ids=list(range(16, 900)), logprobs=1)
    want = [sample.token_ids for sample in stream(llm, params)[-1].outputs]
    assert len({len(tokens) for tokens in want}) > 1, "they end at different times"
    engine = llm.llm_engine
    engine.add_request("s", PROMPT, params, stream=True)
    last = None
    while engine.has_unfinished_requests():
        for state in engine.step():
            last = [list(sample.token_ids) for sample in state.outputs]
            for sample in state.outputs:
                sample.token_ids.clear()
                sample.logprobs.clear()
                sample.text = "?"
            state.prompt_token_ids.clear()
    engine.settle()
    assert last == want


def test_log_probabilities_grow_with_the_tokens(llm):
    for state in stream(llm, SamplingParams(seed=1, max_tokens=12, ignore_eos=True, logprobs=2)):
        sample = state.outputs[0]
        assert len(sample.logprobs) == len(sample.token_logprobs) == len(sample.token_ids)
        assert sample.cumulative_logprob == pytest.approx(sum(sample.token_logprobs))


def test_without_text(llm):
    states = stream(llm, forced(llm, detokenize=False))
    assert set(texts_of(states)) == {""} and len(states) > 10


def test_streaming_changes_no_result(llm):
    params = SamplingParams(seed=3, max_tokens=20, logprobs=1)
    (whole,) = llm.generate(PROMPT, params, use_tqdm=False)
    last = stream(llm, params)[-1]
    assert last.outputs == whole.outputs and last.prompt_token_ids == whole.prompt_token_ids
