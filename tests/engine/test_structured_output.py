"""Structured rows in the engine: equal however they are run, ended as promised, and nobody else's trouble."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from typing import Any

import pytest

from deepinfer.entrypoints.llm import LLM
from deepinfer.outputs import RequestOutput
from deepinfer.sampling_params import SamplingParams
from deepinfer.settings import Settings
from deepinfer.structured_output.sequence import SequenceGrammar
from tests.engine.matrix import DisturbedCore, bundled_prompts
from tests.engine.structured import PROMPT, SHAPES, regex
from tests.support.curves import believed
from tests.support.engines import PLAIN_STEPS, assert_idle, facts, generate, make_llm, watched

STYLES = ({"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.9})


def rows() -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts and parameters: shapes beside free rows, every style of sampling."""
    prompts, params = [], []
    for row, (args, style) in enumerate(itertools.product(SHAPES.values(), STYLES)):
        prompts.append(list(bundled_prompts()[row % 20]))
        params.append(SamplingParams(max_tokens=44, logprobs=1, seed=100 + row, so_args=args, **style))
    return prompts, params


@pytest.fixture(scope="module")
def expected() -> list[Any]:
    """How the plain engine answers: no drafts, each step committed before the next, one request at a time."""
    with make_llm("v41-tiny", settings=PLAIN_STEPS) as llm:
        outputs = [generate(llm, [prompt], param)[0] for prompt, param in zip(*rows())]
    ended = [each.outputs[0] for each in outputs]
    assert {each.finish_reason for each in ended} == {"stop", "length"}
    assert sum(each.finish_reason == "stop" for each in ended) >= len(ended) // 2
    return facts(outputs)


CELLS = {
    f"{drafts}, {'async' if is_async else 'sync'}, {'preempted' if rate else 'undisturbed'}": (
        drafts,
        is_async,
        rate,
    )
    for drafts, is_async, rate in (  # every pair of values meets
        ("off", False, 0.0),
        ("off", True, 0.2),
        ("fixed", False, 0.2),
        ("fixed", True, 0.0),
        ("varlen", True, 0.2),
    )
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CELLS)
def test_equal_however_they_are_run(name: str, expected: list[Any]):
    """In a batch; every cell does what its name says."""
    drafts, is_async, rate = CELLS[name]
    settings = Settings(
        num_draft_tokens=0 if drafts == "off" else 5,
        use_draft_budget=drafts == "varlen",
        use_async_scheduling=is_async,
    )
    prompts, params = rows()
    with (
        believed("modest"),
        make_llm("v41-tiny", settings=settings, max_num_seqs=16) as llm,
        watched(llm, DisturbedCore, rate) as core,
    ):
        outputs = generate(llm, prompts, params)
        stats = llm.get_stats()
        assert (core.num_preempted > 0) == (rate > 0) and (core.num_overlapped > 0) == is_async
    for row, (got, want) in enumerate(zip(facts(outputs), expected, strict=True)):
        assert got == want, f"row {row}, {params[row]}:\n{got}\ninstead of\n{want}"
    structured = [each for each, param in zip(outputs, params) if param.so_args]
    assert (sum(each.metrics.num_accepted_tokens for each in structured) > 0) == (drafts != "off")
    assert stats.num_structured_steps > 40 and stats.grammar_seconds > 0


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with make_llm("v41-tiny") as llm:
        yield llm


@pytest.fixture(scope="module")
def plain() -> Iterator[LLM]:
    with make_llm("v41-tiny", settings=PLAIN_STEPS) as llm:
        yield llm


FEATURES: dict[str, tuple[dict[str, Any], str]] = {
    # options, and the reason of the end
    "length inside the grammar": ({"max_tokens": 5}, "length"),
    "length at its last character": ({"max_tokens": 1, "expression": "a"}, "length"),
    "ignores the end": ({"ignore_eos": True, "max_tokens": 30}, "stop"),
    "more tokens than it has": ({"min_tokens": 25, "max_tokens": 30}, "stop"),
    "as many tokens as it may have": ({"expression": "(a|b){1,30}", "min_tokens": 6}, "stop"),
    "another end": ({"eos_id": 7}, "stop"),
    "a special stop token": ({"stop_token_ids": [4], "logit_bias": {1: -100.0, 4: 50.0}}, "stop"),
    "a stop string": ({"stop": ["xyz", "-"]}, "stop"),
    "log-probabilities": ({"logprobs": 3, "prompt_logprobs": 1}, "stop"),
    "penalties": ({"repetition_penalty": 1.4, "presence_penalty": 1.0, "frequency_penalty": 0.5}, "stop"),
    "random": ({"temperature": 1.0, "top_k": 40, "seed": 4}, "stop"),
    "by ratio, greedy": ({"verification": "ratio"}, "stop"),
    "no first end": ({"expression": "(ab){0,4}", "first_n_token_no_eos": 3}, "stop"),
    "several": ({"n": 4, "temperature": 1.0, "seed": 5, "logprobs": 0}, "stop"),
}


@pytest.mark.parametrize("name", FEATURES)
def test_features(llm: LLM, plain: LLM, name: str):
    options, reason = FEATURES[name]
    options = dict(options)
    params = regex(options.pop("expression", "[A-Z]{2}-[0-9]{3}(,[a-z]{2}){2}"), **options)
    outputs = generate(llm, [PROMPT, [5, *PROMPT]], params)
    assert facts(outputs) == facts(generate(plain, [PROMPT, [5, *PROMPT]], params))
    samples = [sample for output in outputs for sample in output.outputs]
    assert {sample.finish_reason for sample in samples} == {reason}, samples[0]
    if reason == "stop" and name != "a stop string":
        assert all(re.fullmatch(params.so_args["schema"], sample.text) for sample in samples)
        ends = {sample.token_ids[-1] for sample in samples}
        assert ends == {params.eos_id or (4 if params.stop_token_ids else 1)}
    if name == "more tokens than it has":
        assert all(len(sample.token_ids) < 25 for sample in samples), "a complete grammar ends the output"
    if name == "as many tokens as it may have":
        assert all(len(sample.token_ids) >= 6 for sample in samples), "elsewhere the minimum holds"
    if name == "several":
        assert len({sample.text for sample in samples}) > 1


def test_a_forced_token_that_breaks_the_grammar_ends_its_row(llm: LLM, plain: LLM):
    tokens = llm.get_tokenizer().encode("abZ", add_special_tokens=False)
    a, b, z = (llm.get_tokenizer().encode(c, add_special_tokens=False)[0] for c in "abZ")
    assert len(tokens) <= 3
    fine = regex("[a-z]{4}", golden_token_ids=[a, b])
    broken = regex("[a-z]{4}", golden_token_ids=[a, b, z])
    for each in (llm, plain):
        outputs = generate(each, [PROMPT] * 3, [fine, broken, fine])
        good, bad, other = (output.outputs[0] for output in outputs)
        assert good.finish_reason == other.finish_reason == "stop" and good.token_ids[:2] == [a, b]
        assert (bad.finish_reason, bad.error.kind, bad.token_ids) == ("error", "grammar", [a, b])


def test_options_that_leave_no_token_end_their_row(llm: LLM):
    none = regex("[0-9]{3}", allowed_token_ids=[1, 3000])
    bad, good = generate(llm, [PROMPT] * 2, [none, regex("[0-9]{3}")])
    assert bad.error.kind == "no_token" and "grammar" in bad.error.message
    assert good.outputs[0].finish_reason == "stop"


def test_a_matcher_that_fails_ends_its_row(llm: LLM, monkeypatch: pytest.MonkeyPatch):
    """Whenever it fails, whatever it does."""
    real, doomed = SequenceGrammar._fill, []

    def fill(self: SequenceGrammar) -> None:
        if self in doomed and self.num_filled >= 3:
            raise RuntimeError("[10:00:00] /somewhere/parser.cc:7: no way on")
        if not doomed:
            doomed.append(self)
        real(self)

    monkeypatch.setattr(SequenceGrammar, "_fill", fill)
    outputs = [each.outputs[0] for each in generate(llm, [PROMPT] * 3, regex("[a-z]{12}"))]
    failed = [each for each in outputs if each.finish_reason == "error"]
    assert len(failed) == 1 and [each.finish_reason for each in outputs].count("stop") == 2
    assert failed[0].error.kind == "grammar" and failed[0].error.message == "its matcher failed: no way on"


def test_a_matcher_that_takes_too_long_ends_its_row(llm: LLM, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("deepinfer.structured_output.sequence.MAX_TOKEN_SECONDS", -1.0)
    free = SamplingParams(max_tokens=4, temperature=0)
    slow, other = generate(llm, [PROMPT] * 2, [regex("[a-z]{12}"), free])
    assert slow.error.kind == "grammar" and "seconds for a token" in slow.error.message
    assert other.outputs[0].finish_reason == "length"


class Fault(Exception):
    pass


def test_an_interrupted_step_leaves_the_grammars_right(llm: LLM, plain: LLM):
    """What was emitted and never committed is emitted again."""
    params = [regex("[a-z]{3}( [a-z]{4}){3}", temperature=1.0, seed=seed) for seed in range(3)]
    engine, runner = llm.llm_engine, llm.llm_engine.model_runner
    real, calls = runner.sample, itertools.count()

    def sample(*args: Any) -> Any:
        result = real(*args)
        if next(calls) in (1, 2, 4):
            raise Fault
        return result

    runner.sample = sample
    for row, param in enumerate(params):
        engine.add_request(f"r{row}", PROMPT, param)
    outputs: dict[str, RequestOutput] = {}
    num_faults = 0
    while engine.has_unfinished_requests():
        try:
            outputs |= {output.request_id: output for output in engine.step()}
        except Fault:
            num_faults += 1
    del runner.sample
    engine.settle()
    assert_idle(llm)
    assert num_faults == 3
    assert facts([outputs[f"r{row}"] for row in range(3)]) == facts(generate(plain, [PROMPT] * 3, params))
