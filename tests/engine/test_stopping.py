"""Where an output ends: stop strings, stop tokens, EOS, least and most tokens, the end of the context."""

from __future__ import annotations

import pytest

from deepinfer.outputs import CompletionOutput
from deepinfer.sampling_params import SamplingParams
from tests.support.engines import generate, make_llm, prompt_of

TEXT = "The quick brown fox jumps over the lazy dog."
EOS = 1


@pytest.fixture(scope="module")
def llm():
    with make_llm(max_num_seqs=8, max_model_len=256) as llm:
        yield llm


def tokens_of(llm, text: str = TEXT) -> list[int]:
    return llm.get_tokenizer().encode(text, add_special_tokens=False)


def run(llm, tokens: list[int], **options) -> CompletionOutput:
    """The completion whose tokens are forced to be these, as far as it goes."""
    options.setdefault("max_tokens", len(tokens))
    params = SamplingParams(temperature=0, golden_token_ids=tokens, logprobs=1, **options)
    sample = generate(llm, [[20, 30]], params)[0].outputs[0]
    assert len(sample.logprobs) == len(sample.token_logprobs) == len(sample.token_ids)
    assert sample.cumulative_logprob == pytest.approx(sum(sample.token_logprobs))
    return sample


def all_cuts(text: str) -> list[str]:
    """Stop strings that begin and end inside tokens, at their borders, and across several."""
    return [text[start : start + size] for start in range(3, 30, 4) for size in (1, 2, 5, 11)]


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("stop", all_cuts(TEXT))
def test_stop_strings_across_token_borders(llm, stop, include):
    tokens = tokens_of(llm)
    sample = run(llm, tokens, stop=stop, include_stop_str_in_output=include)
    begin = TEXT.index(stop)
    assert (sample.finish_reason, sample.stop_reason) == ("stop", stop)
    assert sample.text == TEXT[: begin + len(stop) * include]
    decode = llm.get_tokenizer().decode
    assert stop in decode(sample.token_ids), "the token that completed it is there"
    assert stop not in decode(sample.token_ids[:-1]), "and none behind it"
    assert sample.token_ids == tokens[: len(sample.token_ids)]


def test_the_first_of_several_stop_strings(llm):
    sample = run(llm, tokens_of(llm), stop=["lazy", "fox j", "umps", "x jumps"])
    assert (sample.text, sample.stop_reason) == ("The quick brown ", "fox j")


def test_a_stop_string_that_the_prompt_only_begins(llm):
    """Text of the prompt takes no part in the search."""
    tokens = tokens_of(llm)
    prompt, output = tokens[:3], tokens[3:]
    text = llm.get_tokenizer().decode(output)
    stop = llm.get_tokenizer().decode(prompt)[-3:] + text[:3]
    params = SamplingParams(temperature=0, golden_token_ids=output, max_tokens=len(output), stop=stop)
    sample = generate(llm, [prompt], params)[0].outputs[0]
    assert (sample.finish_reason, sample.text) == ("length", text)


def test_a_stop_string_in_the_last_token(llm):
    sample = run(llm, tokens_of(llm), stop="dog.")
    assert (sample.finish_reason, sample.stop_reason) == ("stop", "dog.")
    assert sample.text == TEXT[:-4]


def test_min_tokens_and_stop_strings(llm):
    tokens = tokens_of(llm, "ab ab ab ab ab ab")
    first = run(llm, tokens, stop="b")
    later = run(llm, tokens, stop="b", min_tokens=len(first.token_ids))
    assert len(later.token_ids) > len(first.token_ids) and later.text.startswith("ab ")
    assert later.stop_reason == "b" and later.text.endswith("a")


@pytest.mark.parametrize("include", [False, True])
def test_eos(llm, include):
    tokens = [*tokens_of(llm, "yes"), EOS, *tokens_of(llm, " and no")]
    sample = run(llm, tokens, include_stop_str_in_output=include, skip_special_tokens=False)
    assert (sample.finish_reason, sample.stop_reason) == ("stop", None)
    assert sample.token_ids[-1] == EOS and sample.token_ids == tokens[: len(sample.token_ids)]
    assert sample.text == "yes" + llm.get_tokenizer().eos_token * include


def test_ignored_eos(llm):
    tokens = [*tokens_of(llm, "yes"), EOS, *tokens_of(llm, " and no")]
    sample = run(llm, tokens, ignore_eos=True)
    assert (sample.finish_reason, sample.text, sample.token_ids) == ("length", "yes and no", tokens)
    shown = run(llm, tokens, ignore_eos=True, skip_special_tokens=False)
    assert shown.text == f"yes{llm.get_tokenizer().eos_token} and no"


@pytest.mark.parametrize("include", [False, True])
def test_stop_token_ids(llm, include):
    tokens = tokens_of(llm)
    sample = run(llm, tokens, stop_token_ids=[tokens[3], tokens[6]], include_stop_str_in_output=include)
    assert (sample.finish_reason, sample.stop_reason) == ("stop", tokens[3])
    assert sample.token_ids == tokens[:4]
    assert sample.text == llm.get_tokenizer().decode(tokens[: 3 + include])


def test_stop_tokens_before_min_tokens_do_not_stop(llm):
    tokens = tokens_of(llm)
    sample = run(llm, tokens, stop_token_ids=[tokens[2], tokens[5]], min_tokens=4)
    assert sample.stop_reason == tokens[5] and len(sample.token_ids) == 6


def test_another_eos(llm):
    tokens = tokens_of(llm)
    sample = run(llm, tokens, eos_id=tokens[4])
    assert (sample.finish_reason, sample.stop_reason, len(sample.token_ids)) == ("stop", None, 5)


def test_eos_cannot_come_too_early(llm):
    """A bias that makes EOS certain, against `min_tokens` and `first_n_token_no_eos`."""
    certain = {"logit_bias": {EOS: 1e4}, "temperature": 0, "max_tokens": 9}
    cases = {
        1: {},
        4: {"min_tokens": 3},
        3: {"first_n_token_no_eos": 2},
        6: {"min_tokens": 5, "first_n_token_no_eos": 2},
    }
    for length, options in cases.items():
        sample = generate(llm, [[20, 30]], SamplingParams(**certain, **options))[0].outputs[0]
        assert (len(sample.token_ids), sample.finish_reason) == (length, "stop")
        assert sample.token_ids.count(EOS) == 1
    sample = generate(llm, [[20, 30]], SamplingParams(**certain, ignore_eos=True))[0].outputs[0]
    assert sample.token_ids == [EOS] * 9
    late = SamplingParams(**certain, ignore_eos=True, first_n_token_no_eos=4)
    sample = generate(llm, [[20, 30]], late)[0].outputs[0]
    assert EOS not in sample.token_ids[:4] and sample.token_ids[4:] == [EOS] * 5


@pytest.mark.parametrize("max_tokens", [1, 2, 7])
def test_max_tokens(llm, max_tokens):
    sample = generate(llm, [[20, 30]], SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True))[
        0
    ]
    assert len(sample.outputs[0].token_ids) == max_tokens
    assert sample.outputs[0].finish_reason == "length"


@pytest.mark.parametrize("length", [255, 254, 253, 250, 200])
@pytest.mark.parametrize("max_tokens", [None, 1000])
def test_the_end_of_the_context(llm, length, max_tokens):
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    sample = generate(llm, [list(prompt_of(length))], params)[0].outputs[0]
    assert (len(sample.token_ids), sample.finish_reason) == (256 - length, "length")


def test_the_end_of_the_context_does_not_change_what_comes_before(llm):
    """With and without room behind it; drafts must not reach beyond the end."""
    prompt = list(prompt_of(248))
    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True, logprobs=2)
    with make_llm(max_num_seqs=2, max_model_len=512) as roomy:
        (long,) = generate(roomy, [prompt], params.clone(max_tokens=20))
    (short,) = generate(llm, [prompt], params)
    assert short.outputs[0].token_ids == long.outputs[0].token_ids[:8]
    assert short.outputs[0].logprobs == long.outputs[0].logprobs[:8]


def test_without_text(llm):
    tokens = tokens_of(llm)
    sample = run(llm, tokens, detokenize=False)
    assert sample.text == "" and sample.token_ids == tokens
    assert {entry.decoded_token for place in sample.logprobs for entry in place.values()} == {None}


def test_special_tokens(llm):
    tokenizer = llm.get_tokenizer()
    special = [token for token in tokenizer.all_special_ids if token not in (EOS, *tokenizer.internal_ids)][
        :3
    ]
    tokens = [*tokens_of(llm, "a b"), *special, *tokens_of(llm, " c")]
    assert run(llm, tokens).text == "a b c"
    assert run(llm, tokens, skip_special_tokens=False).text == tokenizer.decode(tokens)
