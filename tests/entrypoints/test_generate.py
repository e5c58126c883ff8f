"""LLM: prompts in any spelling, results in order, seeds, iteration, chat, closing."""

from __future__ import annotations

import gc
import re

import numpy as np
import pytest
import torch

from deepinfer.engine.intake import InvalidRequestError
from deepinfer.sampling.seeds import sample_seed
from deepinfer.sampling_params import SamplingParams
from deepinfer.settings import Settings
from tests.support.engines import assert_idle, facts, generate, greedy, make_llm, prompt_of
from tests.support.paths import V41_TINY

CAPITAL = "<｜User｜>What is the capital of France?<｜Assistant｜></think>"
TEXTS = ["Once upon a time", CAPITAL, "The dog", "One day, a boy named Tim found"]
HOT = {"temperature": 3.0, "max_tokens": 8, "ignore_eos": True}


def tokens(outputs):
    return [[sample.token_ids for sample in output.outputs] for output in outputs]


# Results


def test_results_stand_in_input_order(llm, tokenizer):
    """Also when later prompts end first."""
    lengths = [6, 1, 4, 2]
    params = [greedy(count) for count in lengths]
    outputs = generate(llm, TEXTS, params)
    assert [output.prompt for output in outputs] == TEXTS
    assert [output.prompt_token_ids for output in outputs] == [tokenizer.encode(text) for text in TEXTS]
    assert [len(output.outputs[0].token_ids) for output in outputs] == lengths
    assert all(output.finished and output.error is None for output in outputs)
    assert len({output.request_id for output in outputs}) == len(TEXTS)
    for text, param, output in zip(TEXTS, params, outputs, strict=True):
        assert facts(generate(llm, text, param)) == facts([output])


def test_more_prompts_than_run_at_once(llm):
    prompts = [list(prompt_of(3 + place % 3, place)) for place in range(40)]
    outputs = generate(llm, prompts, greedy(2))
    assert [output.prompt_token_ids for output in outputs] == prompts
    assert facts(outputs[36:]) == facts(generate(llm, prompts[36:], greedy(2)))


def test_results_belong_to_the_caller(llm):
    params = greedy(4, logprobs=2, prompt_logprobs=1, n=2)
    first = generate(llm, TEXTS[:2], params)
    want = facts(generate(llm, TEXTS[:2], params))
    assert facts(first) == want
    for output in first:
        output.prompt_token_ids[:] = [7]
        output.prompt_token_logprobs.clear()
        output.prompt_logprobs.clear()
        for sample in output.outputs:
            sample.token_ids.append(3)
            sample.token_logprobs[:] = []
            sample.logprobs[0].clear()
        output.outputs.clear()
    assert facts(generate(llm, TEXTS[:2], params)) == want


def test_inputs_are_read_at_the_call(llm):
    ids, params = np.array(prompt_of(5)), greedy(6)
    want = facts(generate(llm, ids, params))
    results = llm.generate_iter(ids, params)
    ids[:] = 17
    assert facts([output for _, output in results]) == want


def test_results_survive_the_engine():
    with make_llm("tiny-quant", max_num_seqs=2) as llm:
        output = llm.generate(prompt_of(3), greedy(2), use_tqdm=False)[0]
        text = repr(output)
    del llm
    gc.collect()
    assert repr(output) == text and len(output.outputs[0].token_ids) == 2


# Prompts


def test_every_spelling_of_a_prompt(llm, tokenizer):
    text = TEXTS[0]
    ids = tokenizer.encode(text)
    spellings = [
        text,
        ids,
        tuple(ids),
        np.array(ids),
        np.array(ids, dtype=np.uint16),
        torch.tensor(ids),
        [np.int32(token) for token in ids],
        {"prompt": text},
        {"prompt_token_ids": ids},
        {"prompt": "only shown", "prompt_token_ids": np.array(ids)},
    ]
    outputs = generate(llm, spellings, greedy(3))
    want = generate(llm, text, greedy(3))[0]
    for spelling, output in zip(spellings, outputs, strict=True):
        assert (output.prompt_token_ids, tokens([output])) == (ids, tokens([want])), spelling
    assert [output.prompt for output in outputs] == [text] + [None] * 6 + [text, None, "only shown"]
    for spelling, output in zip(spellings, outputs, strict=True):  # each as the only prompt
        assert facts(generate(llm, spelling, greedy(3))) == facts([output])


def test_an_array_of_prompts(llm):
    rows = np.array([prompt_of(6, seed) for seed in range(3)])
    want = facts(generate(llm, rows.tolist(), greedy(3)))
    assert facts(generate(llm, rows, greedy(3))) == want
    assert facts(generate(llm, torch.from_numpy(rows), greedy(3))) == want
    assert facts(generate(llm, None, greedy(3), prompt_token_ids=rows)) == want


def test_prompt_token_ids(llm):
    rows = [list(prompt_of(3)), list(prompt_of(4))]
    want = generate(llm, rows, greedy(3))
    assert facts(generate(llm, None, greedy(3), prompt_token_ids=rows)) == facts(want)
    assert facts(generate(llm, None, greedy(3), prompt_token_ids=rows[1])) == facts(want[1:])
    both = generate(llm, ["one", "two"], greedy(3), prompt_token_ids=rows)
    assert facts(both) == facts(want) and [output.prompt for output in both] == ["one", "two"]
    assert facts(generate(llm, "one", greedy(3), prompt_token_ids=rows[0])) == facts(want[:1])


@pytest.mark.parametrize("texts", ["one", ["one"], ["one", "two", "three"]])
def test_prompts_and_token_ids_of_different_number(llm, texts):
    with pytest.raises(ValueError, match="prompts but 2 prompt_token_ids: lengths must match"):
        llm.generate(texts, prompt_token_ids=[[3], [4]])


def test_no_prompts(llm):
    assert llm.generate([]) == []
    assert llm.generate(prompt_token_ids=[]) == []
    assert llm.generate([], []) == []
    assert list(llm.generate_iter([])) == []
    with pytest.raises(ValueError, match="pass prompts or prompt_token_ids"):
        llm.generate()


@pytest.mark.parametrize("prompts", [5, 1.5, True, object(), {3}, iter(["a"])])
def test_what_is_no_prompt(llm, prompts):
    with pytest.raises(ValueError, match="prompts must be one prompt or a list of prompts"):
        llm.generate(prompts)


# Parameters


def test_parameters_for_each_prompt(llm):
    with pytest.raises(ValueError, match="3 sampling_params for 2 prompts"):
        llm.generate(TEXTS[:2], [greedy()] * 3)
    with pytest.raises(ValueError, match="0 sampling_params for 1 prompts"):
        llm.generate(TEXTS[0], [])
    with pytest.raises(ValueError, match="must be a SamplingParams or a list of them, got dict"):
        llm.generate(TEXTS[0], {"temperature": 0})
    with pytest.raises(InvalidRequestError, match="prompt 1: sampling_params is a int"):
        llm.generate(TEXTS[:2], [greedy(), 3])
    assert_idle(llm)


def test_default_parameters(llm):
    sample = generate(llm, prompt_of(9), None)[0].outputs[0]
    assert len(sample.token_ids) == 16 or sample.finish_reason == "stop"


def test_unknown_keywords_name_the_nearest():
    with pytest.raises(TypeError, match=r"'max_num_seq'.*'max_num_seqs'"):
        make_llm(max_num_seq=3)
    with pytest.raises(TypeError, match=r"'temprature'.*'temperature'"):
        SamplingParams(temprature=1)
    with pytest.raises(ValueError, match=r"DEEPINFER_USE_NEXTN_DECODE$"):
        Settings.from_env({"DEEPINFER_USE_NEXT_DECODE": "1"})


# Seeds


def test_samples_equal_requests_with_their_seeds(llm):
    seed, n = 1234, 3
    for prompt in (prompt_of(5), TEXTS[1]):
        output = generate(llm, prompt, SamplingParams(n=n, seed=seed, logprobs=1, **HOT))[0]
        assert [sample.index for sample in output.outputs] == list(range(n))
        for j, sample in enumerate(output.outputs):
            alone = SamplingParams(seed=sample_seed(seed, j), logprobs=1, **HOT)
            want = generate(llm, prompt, alone)[0].outputs[0]
            got = (sample.token_ids, sample.text, sample.logprobs, sample.cumulative_logprob)
            assert got == (want.token_ids, want.text, want.logprobs, want.cumulative_logprob)
        assert len({tuple(sample.token_ids) for sample in output.outputs}) == n


def test_samples_may_end_at_different_places(llm):
    """A request ends with the last of its samples; the others keep what they were."""
    params = SamplingParams(n=6, seed=3, stop_token_ids=range(16, 800), **HOT)
    output = generate(llm, TEXTS[0], params)[0]
    assert {sample.finish_reason for sample in output.outputs} == {"stop", "length"}
    for sample in output.outputs:
        assert (sample.stop_reason is None) == (sample.finish_reason == "length")
        assert (len(sample.token_ids) == 8) or sample.stop_reason == sample.token_ids[-1]


def test_an_explicit_seed_is_used_as_given_for_every_prompt(llm):
    params = SamplingParams(seed=99, **HOT)
    outputs = generate(llm, [prompt_of(4)] * 3 + [prompt_of(5)], params)
    assert tokens(outputs[:1]) == tokens(outputs[1:2]) == tokens(outputs[2:3])
    assert tokens(generate(llm, prompt_of(5), params)) == tokens(outputs[3:])
    assert tokens(generate(llm, prompt_of(4), SamplingParams(seq_seed=99, **HOT))) == tokens(outputs[:1])
    assert tokens(generate(llm, prompt_of(4), SamplingParams(seed=100, **HOT))) != tokens(outputs[:1])


def test_without_a_seed_every_prompt_and_call_draws_anew(llm):
    params = SamplingParams(**HOT)
    rows = tokens(generate(llm, [prompt_of(4)] * 4, params)) + tokens(
        generate(llm, [prompt_of(4)] * 2, params)
    )
    assert len({tuple(row[0]) for row in rows}) == 6


# Iteration


def test_iteration_is_in_order_of_completion(llm):
    params = [greedy(24), greedy(1), greedy(12)]
    found = list(llm.generate_iter(TEXTS[:3], params))
    assert [row for row, _ in found] == [1, 2, 0]
    by_row = [output for _, output in sorted(found, key=lambda item: item[0])]
    assert facts(by_row) == facts(generate(llm, TEXTS[:3], params))


def test_iteration_checks_everything_at_the_call(llm):
    with pytest.raises(InvalidRequestError, match="prompt 1: "):
        llm.generate_iter([[3], []])
    assert_idle(llm)


@pytest.mark.parametrize("taken", [0, 1, 2])
def test_closing_the_iterator_ends_the_rest(llm, taken):
    params = [greedy(count) for count in (1, 7, 100, 100)]
    results = llm.generate_iter(TEXTS, params)
    rows = [next(results)[0] for _ in range(taken)]
    assert rows == [0, 1][:taken]
    if taken:
        assert llm.llm_engine.core.num_unfinished >= 2
    results.close()
    assert llm.llm_engine.core.num_unfinished == 0
    assert_idle(llm)
    assert list(results) == []


def test_a_forgotten_iterator_ends_the_rest(llm):
    for _, _ in llm.generate_iter(TEXTS[:2], [greedy(1), greedy(200)]):
        break
    gc.collect()
    assert_idle(llm)


def test_calls_between_two_results(llm):
    params = [greedy(2), greedy(15), greedy(30)]
    want = facts(generate(llm, TEXTS[:3], params))
    other = facts(generate(llm, TEXTS[3], greedy(8)))
    results = llm.generate_iter(TEXTS[:3], params)
    found = dict([next(results)])
    assert facts(llm.generate(TEXTS[3], greedy(8), use_tqdm=False)) == other
    inner = llm.generate_iter(TEXTS[3], greedy(8))
    found |= dict([next(results)])
    assert facts([output for _, output in inner]) == other
    found |= dict(results)
    assert facts([found[row] for row in range(3)]) == want
    assert_idle(llm)


# Chat


def ask(text):
    return [{"role": "user", "content": text}]


def test_chat(llm, tokenizer):
    output = llm.chat(ask("What is the capital of France?"), greedy(10), use_tqdm=False)
    assert len(output) == 1 and "Paris" in output[0].outputs[0].text
    assert output[0].prompt_token_ids == tokenizer.encode(CAPITAL), "begins with one begin token"
    assert tokens(output) == tokens(generate(llm, CAPITAL, greedy(10)))
    assert_idle(llm)


def test_chat_of_several_conversations(llm):
    one = ask("What is the capital of France?")
    two = [{"role": "system", "content": "Be kind."}, *ask("Hello"), {"role": "assistant", "content": "Hi!"}]
    two += ask("Tell me a story")
    params = [greedy(5), greedy(3)]
    outputs = llm.chat([one, two], params, use_tqdm=False)
    assert facts(outputs) == facts(
        llm.chat(one, params[0], use_tqdm=False) + llm.chat(two, params[1], use_tqdm=False)
    )
    parts = llm.chat([{"role": "user", "content": [{"type": "text", "text": one[0]["content"]}]}], params[0])
    assert facts(parts) == facts(outputs[:1])


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "messages is empty"),
        (None, "messages is empty"),
        ("Hello", "list of conversations, got str"),
        ({"role": "user", "content": "Hello"}, "list of conversations, got dict"),
        (7, "list of conversations, got int"),
        ([{"content": "Hello"}], r"prompt 0: messages\[0\] must be an object with a `role`"),
        ([{"role": "user", "content": 5}], r"prompt 0: messages\[0\]: content must be text"),
        ([ask("Hello"), []], "prompt 1: a conversation needs at least one message"),
        ([ask("Hello"), "Hello"], "prompt 1: a conversation is a list of messages, got str"),
        ([ask("Hello"), ["Hello"]], r"prompt 1: messages\[0\] must be an object"),
    ],
)
def test_bad_messages(llm, messages, message):
    with pytest.raises(ValueError, match=message):
        llm.chat(messages)
    assert_idle(llm)


def test_a_bad_conversation_does_not_sink_the_others(llm):
    conversations = [[], ask("Hello"), [{"role": 3}]]
    outputs = llm.chat(conversations, greedy(3), use_tqdm=False, on_error="return")
    assert [output.error and output.error.kind for output in outputs] == [
        "invalid_request",
        None,
        "invalid_request",
    ]
    assert "at least one message" in outputs[0].error.message
    assert facts(outputs[1:2]) == facts(llm.chat(ask("Hello"), greedy(3), use_tqdm=False))


def test_chat_in_the_format_of_the_release():
    """A checkpoint without a chat template uses the package of the release, or says which one is missing."""
    try:
        import deepseek_recipe  # noqa: F401
    except ImportError:
        expected = pytest.raises(ImportError, match=r"deepinfer\[chat\]")
    else:
        expected = None
    with make_llm("tiny-quant", max_num_seqs=2) as llm:
        if expected is not None:
            with expected:
                llm.chat(ask("Hello"))
            return
        output = llm.chat(ask("Hello"), greedy(2), use_tqdm=False)[0]
        assert output.prompt_token_ids == llm.get_tokenizer().apply_chat_template(ask("Hello"))


# Engines


def test_two_engines_in_one_process(llm):
    with make_llm("tiny-quant", max_num_seqs=3) as other:
        prompts = [prompt_of(length) for length in (3, 130, 7, 20)]
        params = [SamplingParams(seed=5, temperature=1.0, max_tokens=count) for count in (12, 2, 5, 8)]
        want = [facts(generate(each, prompts, params)) for each in (llm, other)]
        assert want[0] != want[1]
        found: list[dict] = [{}, {}]
        streams = [each.generate_iter(prompts, params) for each in (llm, other)]
        for pair in zip(*streams, strict=True):
            for rows, (row, output) in zip(found, pair, strict=True):
                rows[row] = output
        assert [facts([rows[row] for row in range(4)]) for rows in found] == want
        assert_idle(other)
    assert facts(generate(llm, prompts, params)) == want[0], "closing one leaves the other"
    assert_idle(llm)


def test_close():
    with make_llm("tiny-quant", max_num_seqs=2) as llm:
        results = llm.generate_iter([[20], [21]], [greedy(1), greedy(50)])
        assert next(results)[0] == 0
    llm.close()
    llm.close()
    for use in (
        lambda: llm.generate([[20]]),
        lambda: llm.generate_iter([[20]]),
        lambda: llm.chat(ask("Hello")),
        lambda: llm.llm_engine.add_request("a", [20]),
        lambda: llm.llm_engine.step(),
        lambda: llm.__enter__(),
        lambda: next(results),
    ):
        with pytest.raises(RuntimeError, match="closed"):
            use()
    assert not llm.llm_engine.has_unfinished_requests()
    assert llm.get_tokenizer().encode("a")


def test_an_exception_inside_the_context_closes():
    with pytest.raises(KeyError), make_llm("tiny-quant", max_num_seqs=2) as llm:
        raise KeyError
    with pytest.raises(RuntimeError, match="closed"):
        llm.generate("a")


def test_a_missing_checkpoint(tmp_path):
    from deepinfer.checkpoint.errors import CheckpointError
    from deepinfer.entrypoints.llm import LLM

    with pytest.raises(CheckpointError, match=re.escape(str(tmp_path))):
        LLM(str(tmp_path), settings=Settings())


def test_the_package_offers_the_api():
    import deepinfer
    from deepinfer.entrypoints.llm import LLM

    assert deepinfer.LLM is LLM and deepinfer.SamplingParams is SamplingParams
    with deepinfer.LLM(str(V41_TINY), settings=Settings(), max_num_seqs=2, max_model_len=64) as llm:
        assert len(llm.generate("Hello", greedy(2), use_tqdm=False)[0].outputs[0].token_ids) == 2
