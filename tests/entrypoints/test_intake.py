"""What cannot run is refused by its row before any work, or gets a result with the error."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from deepinfer.engine.intake import InvalidRequestError
from deepinfer.sampling_params import SamplingParams
from tests.support.engines import assert_idle, facts, generate, greedy, make_llm, prompt_of, watched

GOOD = list(prompt_of(4))
VOCAB = 4096
MAX_LEN = 1024

# Prompt, and a pattern of the message.
BAD_PROMPTS = {
    "empty list": ([], "the prompt is empty"),
    "empty array": (np.zeros(0, dtype=np.int64), "the prompt is empty"),
    "empty array of floats": (np.zeros(0), "the prompt is empty"),
    "empty tensor": (torch.zeros(0, dtype=torch.long), "the prompt is empty"),
    "out of vocabulary": ([3, VOCAB], r"prompt_token_ids\[1\] is 4096: token ids are 0 to 4095"),
    "negative": ([3, 4, -1], r"prompt_token_ids\[2\] is -1: token ids are 0 to 4095"),
    "out of int32": ([2**31], rf"prompt_token_ids\[0\] is {2**31}"),
    "out of int64": ([3, 2**63], rf"prompt_token_ids\[1\] is {2**63}: not a token id"),
    "below int64": ([-(2**70)], r"prompt_token_ids\[0\] is -\d+: not a token id"),
    "wraps in int32": ([2**32 + 5], rf"prompt_token_ids\[0\] is {2**32 + 5}"),
    "bool": ([3, True], r"prompt_token_ids\[1\] is True: token ids are integers"),
    "numpy bool": ([3, np.True_], r"prompt_token_ids\[1\] is .*True"),
    "float": ([3.0], r"prompt_token_ids\[0\] is 3.0: token ids are integers"),
    "NaN": ([3, math.nan], r"prompt_token_ids\[1\] is nan"),
    "text among ids": ([3, "4"], r"prompt_token_ids\[1\] is '4'"),
    "none among ids": ([3, None], r"prompt_token_ids\[1\] is None"),
    "nested": ([3, [4]], r"prompt_token_ids\[1\] is \[4\]"),
    "array of floats": (np.ones(3), "array of float64 with 1 dimensions"),
    "array of bools": (np.ones(3, dtype=bool), "array of bool"),
    "array of objects": (np.array([3, None]), "array of object"),
    "2-D array": (np.ones((2, 2), dtype=np.int64), "array of int64 with 2 dimensions"),
    "array out of range": (np.array([2**64 - 1], dtype=np.uint64), r"prompt_token_ids\[0\] is 9223"),
    "tensor of floats": (torch.ones(3), "tensor of torch.float32"),
    "2-D tensor": (torch.ones(2, 2, dtype=torch.long), "with 2 dimensions"),
    "none": (None, "neither text nor token ids"),
    "bytes": (b"abc", "prompt_token_ids is a bytes"),
    "number": (5, "prompt_token_ids is a int"),
    "set": ({3}, "prompt_token_ids is a set"),
    "empty dict": ({}, "neither text nor token ids"),
    "dict with none": ({"prompt": None}, "neither text nor token ids"),
    "dict of another key": ({"text": "a"}, "unknown key 'text'"),
    "dict with one key more": ({"prompt": "a", "image": "b"}, "unknown key 'image'"),
    "text that is none": ({"prompt": 5}, "the prompt is a int"),
    "ids that are text": ({"prompt_token_ids": "abc"}, "prompt_token_ids is a str"),
    "lone surrogate": ("a\ud800b", "character 1 is a lone surrogate"),
    "too long": ([5] * MAX_LEN, "1024 tokens, but max_model_len=1024.*shorten it to 1023"),
    "far too long": ("word " * 5000, "shorten it to 1023 tokens"),
}

# Options, and a pattern of the message.
BAD_PARAMS = {
    "stop id": ({"stop_token_ids": [5, VOCAB]}, r"stop_token_ids\[1\] is 4096: token ids are 0 to 4095"),
    "allowed id": ({"allowed_token_ids": [VOCAB + 4]}, r"allowed_token_ids\[0\] is 4100"),
    "golden id": ({"golden_token_ids": [-1, VOCAB]}, r"golden_token_ids\[1\] is 4096"),
    "bias": ({"logit_bias": {VOCAB: 1.0}}, r"logit_bias\[0\] is 4096"),
    "eos": ({"eos_id": VOCAB}, r"eos_id\[0\] is 4096"),
    "too many samples": ({"n": 70000}, "n is 70000: a request can have 65536"),
    "trigger": (
        {"so_args": {"schema_type": "json", "schema": "{}", "trigger_token_ids": [7, VOCAB]}},
        r"trigger_token_ids\[1\] is 4096",
    ),
    "bound": (
        {
            "so_args": {
                "schema_type": "regex",
                "schema": "a",
                "trigger_token_ids": [7],
                "bound_token_id": VOCAB + 1,
            }
        },
        r"bound_token_id\[0\] is 4097",
    ),
}


@pytest.fixture(scope="module")
def good_facts(llm):
    return facts(generate(llm, GOOD, greedy(2)))


def check_refused(llm, prompts, params, message, good_facts):
    """Row 1 of three is the bad one."""
    with watched(llm) as core:
        with pytest.raises(InvalidRequestError, match=f"(?s)^prompt 1: .*{message}") as caught:
            llm.generate(prompts, params, use_tqdm=False)
        assert core.plans == [] and core.num_unfinished == 0, "nothing ran"
    assert isinstance(caught.value, ValueError) and caught.value.row == 1
    assert_idle(llm)
    outputs = generate(llm, prompts, params, on_error="return")
    assert facts([outputs[0], outputs[2]]) == good_facts * 2
    bad = outputs[1]
    assert bad.finished and bad.prompt_token_ids == [] and len(bad.outputs) == 1
    sample = bad.outputs[0]
    assert (sample.finish_reason, sample.token_ids, sample.text) == ("error", [], "")
    assert bad.error is sample.error and sample.error.kind == caught.value.kind
    assert str(caught.value) == f"prompt 1: {sample.error.message}"
    return sample.error


@pytest.mark.parametrize("name", BAD_PROMPTS)
def test_bad_prompts(llm, name, good_facts):
    prompt, message = BAD_PROMPTS[name]
    error = check_refused(llm, [GOOD, prompt, GOOD], greedy(2), message, good_facts)
    assert error.kind == ("too_long" if "too long" in name else "invalid_request")


@pytest.mark.parametrize("name", BAD_PARAMS)
def test_bad_parameters(llm, name, good_facts):
    options, message = BAD_PARAMS[name]
    params = [greedy(2), SamplingParams(**options), greedy(2)]
    assert check_refused(llm, [GOOD] * 3, params, message, good_facts).kind == "invalid_request"


@pytest.mark.parametrize("name", ["none", "negative", "dict of another key", "lone surrogate", "too long"])
def test_a_bad_first_row_is_one_row(llm, name, good_facts):
    """The first row decides how a list is read; a broken one must not turn the list into one prompt."""
    prompt, message = BAD_PROMPTS[name]
    with pytest.raises(InvalidRequestError, match=f"^prompt 0: .*{message}"):
        llm.generate([prompt, GOOD])
    outputs = generate(llm, [prompt, GOOD], greedy(2), on_error="return")
    assert len(outputs) == 2 and outputs[0].error is not None and facts(outputs[1:]) == good_facts


def test_the_first_bad_row_is_named(llm):
    with pytest.raises(InvalidRequestError, match=r"^prompt 2: ") as caught:
        llm.generate([GOOD, GOOD, [], [-1]])
    assert caught.value.row == 2


def test_only_bad_rows(llm):
    outputs = generate(llm, [[], [-1]], greedy(2), on_error="return")
    assert [output.error.kind for output in outputs] == ["invalid_request"] * 2
    assert outputs[0].request_id != outputs[1].request_id
    assert outputs[0].metrics is not outputs[1].metrics


def test_an_error_keeps_the_text_of_its_prompt(llm):
    text = "word " * 2000
    assert generate(llm, [text], greedy(2), on_error="return")[0].prompt == text


@pytest.mark.parametrize("on_error", ["ignore", None, True])
def test_unknown_ways_to_treat_errors(llm, on_error):
    with pytest.raises(ValueError, match="choose 'raise' or 'return'"):
        llm.generate([GOOD], on_error=on_error)


def test_the_longest_prompt(llm):
    """One output token fits behind max_model_len - 1 tokens, whatever max_tokens says."""
    longest = [5] * (MAX_LEN - 1)
    for params in (greedy(1), greedy(50), greedy(None)):
        sample = generate(llm, longest, params)[0].outputs[0]
        assert (len(sample.token_ids), sample.finish_reason) == (1, "length")


def test_the_edges_of_the_vocabulary(llm):
    """Every id of the vocabulary may be given, and forced; a -1 in golden_token_ids is free."""
    params = greedy(
        3, golden_token_ids=[0, VOCAB - 1], logit_bias={VOCAB - 1: 1.0}, stop_token_ids=[VOCAB - 1]
    )
    output = generate(llm, [0, VOCAB - 1], params)[0]
    assert output.outputs[0].token_ids == [0, VOCAB - 1] and output.outputs[0].stop_reason == VOCAB - 1
    free = generate(llm, GOOD, greedy(2, golden_token_ids=[-1, -1, -1]))
    assert facts(free) == facts(generate(llm, GOOD, greedy(2)))


def test_engine_requests_are_checked_too(llm):
    engine = llm.llm_engine
    for prompt, message in BAD_PROMPTS.values():
        with pytest.raises(InvalidRequestError, match=message) as caught:
            engine.add_request("bad", prompt, greedy(2))
        assert caught.value.row is None
    engine.add_request("twice", GOOD, greedy(2))
    with pytest.raises(ValueError, match="'twice' is still running"):
        engine.add_request("twice", GOOD, greedy(2))
    assert engine.get_num_unfinished_requests() == 1
    while engine.has_unfinished_requests():
        engine.step()
    engine.settle()
    assert_idle(llm)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_model_len": 5000}, "exceeds the model's own limit of 4096"),
        ({"max_num_seqs": 0}, "max_num_seqs=0: expected an integer >= 1"),
        ({"max_model_len": True}, "max_model_len=True"),
        ({"arithmetic": "fp8"}, "choose one of"),
        ({"logprobs_mode": "rawest"}, "choose one of raw, temperature, processed"),
        ({"num_blocks": 8}, "cannot hold one request of max_model_len=1024"),
        ({"tokens_per_block": 64}, "blocks hold 128 tokens"),
        ({"load_format": "gguf"}, "'auto'.*or 'dummy'"),
        ({"max_num_batched_tokens": 10}, "less than a full decode step"),
        ({"chunked_prefill": False, "max_num_batched_tokens": 512}, "less than max_model_len=1024"),
    ],
)
def test_bad_engine_arguments(options, message):
    with pytest.raises(ValueError, match=message):
        make_llm(**options)
