"""Where outputs end: EOS, stop tokens, stop strings, lengths; and what of the text remains."""

from __future__ import annotations

import random

import pytest

from deepinfer.sampling_params import SamplingParams
from tests.support.engines import generate, greedy, make_llm, prompt_of

CAPITAL = "<｜User｜>What is the capital of France?<｜Assistant｜></think>"
EOS = 1
TEXT = "One naïve 日本 🦊 the café: the dog."


@pytest.fixture(scope="module")
def answer(llm):
    """The greedy answer up to EOS: "The capital of France is Paris."."""
    return generate(llm, CAPITAL, SamplingParams(temperature=0))[0].outputs[0]


def run(llm, **options):
    return generate(llm, CAPITAL, SamplingParams(**{"temperature": 0, "max_tokens": 16, **options}))[
        0
    ].outputs[0]


# EOS


def test_eos(llm, tokenizer, answer):
    assert answer.token_ids[-1] == EOS and EOS not in answer.token_ids[:-1] and len(answer.token_ids) < 16
    assert (answer.finish_reason, answer.stop_reason, answer.error) == ("stop", None, None)
    assert answer.text == tokenizer.decode(answer.token_ids[:-1]) == "The capital of France is Paris."


def test_eos_may_be_shown(llm, tokenizer, answer):
    with_special = {"skip_special_tokens": False}
    assert run(llm, **with_special).text == answer.text, "EOS ended it"
    assert run(llm, include_stop_str_in_output=True).text == answer.text, "a special token"
    shown = run(llm, include_stop_str_in_output=True, **with_special)
    assert shown.text == answer.text + tokenizer.eos_token and shown.token_ids == answer.token_ids


def test_ignore_eos(llm, answer):
    count = len(answer.token_ids)
    sample = run(llm, ignore_eos=True)
    assert sample.token_ids[:count] == answer.token_ids and len(sample.token_ids) == 16
    assert (sample.finish_reason, sample.stop_reason) == ("length", None)
    stopped = run(llm, ignore_eos=True, stop_token_ids=[EOS])
    assert (stopped.token_ids, stopped.finish_reason, stopped.stop_reason) == (answer.token_ids, "stop", EOS)


@pytest.mark.parametrize("name", ["min_tokens", "first_n_token_no_eos"])
@pytest.mark.parametrize("ignore_eos", [False, True])
def test_no_eos_among_the_first_tokens(llm, answer, name, ignore_eos):
    """The limits around EOS's place: one that does not reach it changes nothing, the next one bans it."""
    place = len(answer.token_ids) - 1
    free = run(llm, ignore_eos=ignore_eos)
    assert run(llm, ignore_eos=ignore_eos, **{name: place}).token_ids == free.token_ids
    sample = run(llm, ignore_eos=ignore_eos, **{name: place + 1})
    if name == "min_tokens" and ignore_eos:  # EOS ends nothing, so nothing has to be kept away
        assert sample.token_ids == free.token_ids
        return
    assert sample.token_ids[:place] == answer.token_ids[:place] and sample.token_ids[place] != EOS
    assert EOS not in run(llm, ignore_eos=ignore_eos, **{name: 16}).token_ids


def test_another_eos(llm, answer):
    sample = run(llm, eos_id=answer.token_ids[2])
    assert sample.token_ids == answer.token_ids[:3]
    assert (sample.finish_reason, sample.stop_reason) == ("stop", None)
    assert EOS in run(llm, eos_id=5).token_ids, "the checkpoint's is a token like others"


# Stop tokens


def test_every_stop_token(llm, tokenizer, answer):
    tokens = answer.token_ids
    cases = [(token, include) for token in tokens[:-1] for include in (False, True)]
    params = [
        SamplingParams(temperature=0, stop_token_ids=[4000, token], include_stop_str_in_output=include)
        for token, include in cases
    ]
    outputs = generate(llm, [CAPITAL] * len(cases), params)
    for (token, include), output in zip(cases, outputs, strict=True):
        sample, end = output.outputs[0], tokens.index(token)
        assert (sample.token_ids, sample.stop_reason) == (tokens[: end + 1], token)
        assert sample.finish_reason == "stop"
        assert sample.text == tokenizer.decode(tokens[: end + include])


def test_min_tokens_and_stop_tokens(llm, answer):
    """Before min_tokens the token is not sampled at all."""
    token = answer.token_ids[3]
    sample = run(llm, stop_token_ids=[token], min_tokens=4)
    assert sample.token_ids[:3] == answer.token_ids[:3] and sample.token_ids[3] != token
    assert token not in sample.token_ids[:4]
    assert run(llm, stop_token_ids=[token], min_tokens=3).token_ids == answer.token_ids[:4]


def test_a_forced_stop_token_before_min_tokens(llm, answer):
    """A given token stands, but it ends nothing yet."""
    sample = run(llm, golden_token_ids=[50, 50, 50], stop_token_ids=[50], min_tokens=2)
    assert sample.token_ids == [50, 50, 50] and sample.stop_reason == 50


# Stop strings


def known_text(tokenizer, tokens):
    """Text that is certain after so many tokens."""
    return tokenizer.decode(tokens, skip_special_tokens=True).rstrip("\ufffd")


def check_stop(sample, tokenizer, tokens, stops, include, min_tokens=0):
    """By brute force: the string that is complete first, of those the longest."""
    best = None
    full = known_text(tokenizer, tokens)
    for count in range(min_tokens + 1, len(tokens) + 1):
        known = known_text(tokenizer, tokens[:count])
        start_of_new = len(known_text(tokenizer, tokens[: count - 1]))
        ends = [
            (end, -len(stop), stop)
            for stop in stops
            for end in range(start_of_new + 1, len(known) + 1)
            if known[:end].endswith(stop)
        ]
        if ends:
            best = min(ends), count
            break
    if best is None:
        assert (sample.finish_reason, sample.stop_reason, sample.text) == ("length", None, full), stops
        assert sample.token_ids == tokens
        return False
    (end, size, stop), count = best
    assert sample.token_ids == tokens[:count], stops
    assert (sample.finish_reason, sample.stop_reason) == ("stop", stop)
    assert sample.text == full[: end if include else end + size], stops
    return True


@pytest.fixture(scope="module")
def forced(tokenizer):
    """Tokens of a text with characters of several tokens."""
    return tokenizer.encode(TEXT, add_special_tokens=False)


def test_stop_strings_across_tokens(llm, tokenizer, forced, seed):
    """Substrings of a known output, most of which span tokens."""
    order = random.Random(seed)
    edges = {len(known_text(tokenizer, forced[:count])) for count in range(len(forced) + 1)}
    cases = []
    while len(cases) < 32:
        start = order.randrange(len(TEXT))
        stop = TEXT[start : start + order.randrange(1, 12)]
        begin = TEXT.find(stop)
        if begin in edges and begin + len(stop) in edges and order.random() < 0.8:
            continue  # whole tokens are the easy case
        cases.append(((stop,), len(cases) % 2 == 0, 0))
    for _ in range(16):  # several strings, some of which do not occur, and min_tokens
        places = [order.randrange(len(TEXT)) for _ in range(3)]
        stops = [TEXT[place : place + order.randrange(1, 8)] for place in places]
        stops.append(stops[0] + "x")
        cases.append((tuple(dict.fromkeys(stops)), order.random() < 0.5, order.choice([0, 5, 9])))
    params = [
        SamplingParams(
            golden_token_ids=forced,
            max_tokens=len(forced),
            stop=stops,
            include_stop_str_in_output=include,
            min_tokens=min_tokens,
        )
        for stops, include, min_tokens in cases
    ]
    outputs = generate(llm, [[0]] * len(cases), params)
    hits = [
        check_stop(output.outputs[0], tokenizer, forced, *case)
        for output, case in zip(outputs, cases, strict=True)
    ]
    assert sum(hits) > 32


def test_a_stop_string_of_the_models_own_text(llm, tokenizer, answer):
    """Parts of "The capital of France is Paris.": the tokens are " F" "rance" and " P" "ar" "is" "."."""
    tokens = answer.token_ids[:-1]
    cases = [(stop, place % 2 == 0) for place, stop in enumerate(("Fr", "nce i", "aris.", "is.", "T", "."))]
    for stop, include in cases:
        sample = run(llm, stop=stop, include_stop_str_in_output=include)
        assert check_stop(sample, tokenizer, tokens, [stop], include), stop


def test_a_stop_string_that_does_not_occur(llm, answer):
    sample = run(llm, stop=["Paris!", "Berlin", "of of"])
    assert (sample.text, sample.token_ids, sample.stop_reason) == (answer.text, answer.token_ids, None)


def test_the_prompt_holds_no_stop_string(llm, answer):
    """Nor does one that begins in the prompt count."""
    assert run(llm, stop=["What is", "</think>The", "France?"]).text == answer.text


def test_a_stop_string_that_the_last_token_completes(llm, answer):
    sample = run(llm, stop="capital", max_tokens=2)
    assert (sample.finish_reason, sample.text, len(sample.token_ids)) == ("stop", "The ", 2)


def test_stop_strings_end_one_sample(llm):
    """Each of n samples has its own text, and is drawn as it would be without stop strings."""
    params = SamplingParams(n=3, seed=2, temperature=3.0, max_tokens=8, ignore_eos=True)
    whole = generate(llm, "Once upon a time", params)[0].outputs
    stop = whole[1].text[-9:-3]
    samples = generate(llm, "Once upon a time", params.clone(stop=stop))[0].outputs
    assert [sample.text for sample in samples] == [sample.text.partition(stop)[0] for sample in whole]
    assert samples[1].stop_reason == stop
    assert [bool(sample.stop_reason) for sample in samples] == [stop in sample.text for sample in whole]


# Lengths


def test_max_tokens(llm, answer):
    for count in (1, 2, 7, len(answer.token_ids) - 1):
        sample = run(llm, max_tokens=count)
        assert (sample.token_ids, sample.finish_reason) == (answer.token_ids[:count], "length")
    assert run(llm, max_tokens=len(answer.token_ids)).finish_reason == "stop", "EOS is the last one"


def test_the_end_of_the_context():
    with make_llm(max_model_len=24, max_num_seqs=4) as llm:
        for length in (15, 22, 23):
            want = 24 - length
            prompts = [prompt_of(length)] * 4
            params = [greedy(None), greedy(want), greedy(want + 1), greedy(1000, min_tokens=want + 5)]
            samples = [output.outputs[0] for output in generate(llm, prompts, params)]
            assert [len(sample.token_ids) for sample in samples] == [want] * 4
            assert {sample.finish_reason for sample in samples} == {"length"}
            if want > 1:
                (output,) = generate(llm, prompts[0], greedy(want - 1))
                assert output.outputs[0].token_ids == samples[0].token_ids[:-1]
        whole = generate(llm, CAPITAL, SamplingParams(temperature=0, max_tokens=None))[0].outputs[0]
        assert whole.finish_reason == "stop", "EOS comes first"


# Text


def test_without_text(llm, answer):
    sample = run(llm, detokenize=False, logprobs=1)
    assert (sample.text, sample.token_ids, sample.finish_reason) == ("", answer.token_ids, "stop")
    assert {entry.decoded_token for position in sample.logprobs for entry in position.values()} == {None}


def test_special_tokens_in_the_text(llm, tokenizer):
    tokens = [466, 3, 1796, 0, 319, 13, 463]
    for skip in (True, False):
        sample = run(llm, golden_token_ids=tokens, max_tokens=len(tokens), skip_special_tokens=skip)
        assert sample.token_ids == tokens
        assert sample.text == tokenizer.decode(tokens, skip_special_tokens=skip)
    assert "<｜User｜>" in sample.text


def test_text_equals_the_decoded_tokens(llm, tokenizer):
    """Broken bytes in the middle are replaced, an unfinished character at the end is dropped."""
    params = [SamplingParams(seed=place, temperature=20.0, max_tokens=12) for place in range(8)]
    for output in generate(llm, [[0]] * 8, params):
        sample = output.outputs[0]
        shown = sample.token_ids[:-1] if sample.finish_reason == "stop" else sample.token_ids
        whole = tokenizer.decode(shown, skip_special_tokens=True)
        assert whole.startswith(sample.text) and set(whole[len(sample.text) :]) <= {"\ufffd"}
