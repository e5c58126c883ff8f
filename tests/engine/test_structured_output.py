"""Structured rows in the engine: equal however they are run, ended as promised, and nobody else's trouble."""

from __future__ import annotations

import itertools
import json
import math
import re
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from deepinfer.entrypoints.llm import LLM
from deepinfer.outputs import RequestOutput
from deepinfer.sampling_params import SamplingParams
from deepinfer.settings import Settings
from deepinfer.structured_output import process
from deepinfer.structured_output.builder import GrammarError, Ticket
from deepinfer.structured_output.sequence import SequenceGrammar
from tests.engine.matrix import DisturbedCore, bundled_prompts
from tests.sampling.rows import assert_distribution
from tests.structured_output.test_builder import LARGE, SLOW
from tests.support.curves import believed
from tests.support.engines import PLAIN_STEPS, assert_idle, facts, generate, make_llm, prompt_of, watched
from tests.support.roles import engine_pair, run_pair

RECORD = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 16},
        "tags": {"type": "array", "items": {"enum": ["red", "größe", "x"]}, "maxItems": 3},
        "size": {"type": ["integer", "null"], "minimum": -9, "maximum": 900},
    },
    "required": ["name", "tags", "size"],
}
ITEMS = 'root ::= item (";" item){2,5}\nitem ::= [a-z]+ "=" ("yes" | "no")'
SHAPES: dict[str, dict[str, Any] | None] = {
    "json": {"schema_type": "json", "schema": RECORD},
    "regex": {"schema_type": "regex", "schema": "([a-z]{3,8} ){2,6}[0-9]{4}!"},
    "free": None,
    "ebnf": {"schema_type": "ebnf", "schema": ITEMS},
    "choice": {"schema_type": "choice", "schema": ["the first of them", "the second", "größer"]},
    "triggered": {"schema_type": "regex", "schema": "[0-9]{9}", "trigger_token_ids": [2000, 2001],
                  "bound_token_id": 29},
    "also free": None,
    "object": {"schema_type": "json_object"},
}  # fmt: skip
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
    for drafts, is_async, rate in (
        *itertools.product(("off", "fixed"), (False, True), (0.0, 0.2)),
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


PROMPT = list(prompt_of(9, 4))


def regex(expression: str, max_tokens: int = 40, **options: Any) -> SamplingParams:
    args = {"schema_type": "regex", "schema": expression}
    return SamplingParams(**{"max_tokens": max_tokens, "temperature": 0, "so_args": args, **options})


def one(llm: LLM, params: SamplingParams) -> Any:
    """The only completion of a request; drafts change nothing of it."""
    (output,) = generate(llm, [PROMPT], params)
    return output.outputs[0]


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


# --- waiting for grammars -----------------------------------------------------------------------------------


def slow_request(**options: Any) -> SamplingParams:
    return SamplingParams(so_args={"schema_type": "ebnf", "schema": SLOW.source}, **options)


def test_requests_that_wait_hold_up_nobody_and_can_be_aborted(llm: LLM):
    engine = llm.llm_engine
    engine.add_request("waits", PROMPT, slow_request())
    engine.add_request("dropped", PROMPT, slow_request())
    with pytest.raises(ValueError, match="'waits' is still running"):
        engine.add_request("waits", PROMPT)
    with pytest.raises(ValueError, match="'waits' is still running"):
        engine.add_request("waits", PROMPT, slow_request())
    assert engine.so_builder_has_pending() and engine.get_num_unfinished_requests() == 2
    free = SamplingParams(max_tokens=6, temperature=0)
    assert llm.generate([PROMPT], free, use_tqdm=False)[0].outputs[0].finish_reason == "length"
    assert llm.generate([PROMPT], regex("[a-z]{3}"), use_tqdm=False)[0].outputs[0].finish_reason == "stop"
    assert engine.get_num_unfinished_requests() == 2, "they still wait"
    engine.drop_request(["dropped"])
    aborts: list[int] = []
    names = ["waits", "dropped", "unknown"]
    thread = threading.Thread(target=lambda: aborts.append(engine.abort_request(names)))
    thread.start()
    thread.join()
    assert aborts == [1] and engine.abort_request("waits") == 0
    assert engine.has_unfinished_requests()
    (output,) = engine.step()
    assert (output.request_id, output.finished, output.prompt_token_ids) == ("waits", True, PROMPT)
    assert (output.outputs[0].finish_reason, output.outputs[0].token_ids) == ("abort", [])
    assert not engine.has_unfinished_requests() and not engine.so_builder_has_pending()
    assert_idle(llm)


def test_hostile_grammars_end_their_requests_only(monkeypatch: pytest.MonkeyPatch):
    nested = json.loads('{"type":"array","items":' * 90 + '{"type":"integer"}' + "}" * 90)
    hostile = {
        "slow": (SLOW, "within 1 seconds"),
        "large": (LARGE, "make it smaller"),  # memory or time is over first
        "repeats": ({"schema_type": "regex", "schema": "(((a{1,900}b){1,900}c){1,900}d){1,900}"}, ""),
        "catastrophic": ({"schema_type": "regex", "schema": "((a+)+|(a|aa)+)+b"}, ""),
        "recursion": ({"schema_type": "ebnf", "schema": 'root ::= root root | "a" | ""'}, ""),
        "brackets": ({"schema_type": "regex", "schema": "(" * 5000 + "a" + ")" * 5000}, ""),
        "nested": ({"schema_type": "json", "schema": nested}, ""),
        "schema": (
            {"schema_type": "json", "schema": {"properties": {"a": {"not": {}}}}},
            "#/properties/a/not: ",
        ),
        "syntax": ({"schema_type": "ebnf", "schema": "root ::= nothing"}, '"nothing" is not defined'),
    }
    settings = Settings(grammar_timeout_s=1, grammar_memory_bytes=512 << 20, num_draft_tokens=2)
    good = regex("[a-z]{3,30}[0-9]", temperature=1.0, seed=3)
    with make_llm("v41-tiny", settings=settings) as llm:
        expected = facts(generate(llm, [PROMPT], good))
        params = [
            SamplingParams(
                max_tokens=30,
                temperature=0,
                so_args=args if isinstance(args, dict) else {"schema_type": "ebnf", "schema": args.source},
            )
            for args, _ in hostile.values()
        ]
        start = time.monotonic()
        outputs = generate(llm, [PROMPT] * (len(params) + 1), [good, *params])
        assert time.monotonic() - start < 60
        assert facts(outputs[:1]) == expected
        for (name, (_, message)), output in zip(hostile.items(), outputs[1:], strict=True):
            error = output.error
            assert error is None or error.kind == "grammar", f"{name}: {error}"
            # Without a message it may be small enough after all.
            assert not message or message in error.message, f"{name}: {error}"
        assert facts(generate(llm, [PROMPT], good)) == expected


def test_close_ends_requests_that_wait():
    llm = make_llm("v41-tiny")
    llm.llm_engine.add_request("waits", PROMPT, slow_request())
    llm.llm_engine.step()
    builder = llm.llm_engine.grammar_builder
    start = time.monotonic()
    llm.close()
    llm.close()
    assert time.monotonic() - start < 10 and builder.process.pid is None


def test_the_wait_counts_in_the_metrics(monkeypatch: pytest.MonkeyPatch):
    real = process.BuilderProcess._grammar

    def late(self: Any, *args: Any) -> Any:
        time.sleep(0.4)
        return real(self, *args)

    with make_llm("v41-tiny") as llm:
        generate(llm, [PROMPT], regex("a"))
        monkeypatch.setattr(process.BuilderProcess, "_grammar", late)
        (output,) = generate(llm, [PROMPT], regex("[a-z]{3}"))
        assert output.metrics.queue_ms >= 400 and output.metrics.ttft_ms >= 400


def test_without_the_library_requests_are_refused(llm: LLM, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"needs the package xgrammar: install deepinfer\[structured\]"):
        llm.generate([PROMPT], regex("a"), use_tqdm=False)


# --- roles and ratio ----------------------------------------------------------------------------------------


def test_handed_off_sequences_go_on_in_their_grammars(plain: LLM):
    greedy: dict[str, Any] = {"temperature": 0}
    params = {
        "json": SamplingParams(max_tokens=60, temperature=1.0, seed=1, so_args=SHAPES["json"]),
        "vllm": SamplingParams(max_tokens=60, structured_outputs={"regex": "[a-z]{4}-[0-9]{4}"}, **greedy),
        "choice": SamplingParams(max_tokens=60, structured_outputs={"choice": ["größer", "one"]}, **greedy),
        "triggered": SamplingParams(max_tokens=30, temperature=0, so_args=SHAPES["triggered"]),
        "free": SamplingParams(max_tokens=12, temperature=0),
        "several": SamplingParams(max_tokens=40, n=3, seed=8, so_args=SHAPES["regex"]),
        "wrong": SamplingParams(max_tokens=12, structured_outputs={"grammar": "root ::= nothing"}),
    }
    with engine_pair() as (prompt, completion):
        results = run_pair(prompt, completion, {name: (PROMPT, each) for name, each in params.items()})
        assert completion.hand_off_stats.num_sequences == 8
    assert results.pop("wrong").error.kind == "grammar"
    expected = dict(zip(params, facts(generate(plain, [PROMPT] * 6, list(params.values())[:6]))))
    for name, output in results.items():
        assert facts([output]) == [expected[name]], name


def test_a_grammar_that_the_completion_engine_cannot_build_ends_its_request(monkeypatch: pytest.MonkeyPatch):
    """With what the other engine has generated, once, and with all its completions."""
    bad = regex("[a-z]{5}", n=2, temperature=1.0)
    params = {"good": SamplingParams(max_tokens=12, temperature=0), "bad": bad}
    with engine_pair() as (prompt, completion):

        def fail(*args: Any) -> Any:
            raise GrammarError("the compiler has gone")

        monkeypatch.setattr(completion.grammar_builder.process, "_grammar", fail)
        results = run_pair(prompt, completion, {name: (PROMPT, each) for name, each in params.items()})
        assert completion.get_num_unfinished_requests() == 0
    assert results["good"].outputs[0].finish_reason == "length"
    samples = results["bad"].outputs
    assert [sample.index for sample in samples] == [0, 1] and all(
        len(each.token_ids) == 1 for each in samples
    )
    assert {str(sample.error) for sample in samples} == {"grammar: the compiler has gone"}


def test_a_request_that_waits_in_a_completion_engine_can_be_aborted(monkeypatch: pytest.MonkeyPatch):
    with engine_pair() as (prompt, completion):
        monkeypatch.setattr(Ticket, "done", lambda self: self._builder is not completion.grammar_builder)
        prompt.add_request("r", PROMPT, regex("[a-z]{5}", n=2, temperature=1.0))
        while prompt.has_unfinished_requests() or completion._structured.num_waiting < 2:
            prompt.step()
            assert completion.step() == []
        assert completion.get_num_unfinished_requests() > 0
        assert completion.abort_request("r") == 1
        outputs = [output for _ in range(3) for output in completion.step()]
        assert [sample.finish_reason for output in outputs for sample in output.outputs] == ["abort"] * 2


def test_ratio_verification_keeps_the_law():
    """Outputs of a small grammar: their frequencies are the plain sampler's probabilities."""
    args = {"schema_type": "choice", "schema": ["ab", "abc", "b", "ba", "c1"]}
    with make_llm("v41-tiny", settings=PLAIN_STEPS, max_model_len=64, logprobs_mode="processed") as llm:
        law = choice_law(llm, args)
    assert math.isclose(sum(law.values()), 1.0, abs_tol=1e-4) and len(law) > 5
    params = SamplingParams(
        n=1000, max_tokens=8, seed=7, so_args=args, verification="ratio", detokenize=False
    )
    options = {"max_num_seqs": 250, "max_model_len": 64, "enable_prefix_caching": False}
    with make_llm("v41-tiny", settings=Settings(num_draft_tokens=3), **options) as llm:
        (output,) = generate(llm, [PROMPT], params)
    assert {sample.finish_reason for sample in output.outputs} == {"stop"}
    place = {tokens: index for index, tokens in enumerate(law)}
    drawn = torch.tensor([place[tuple(sample.token_ids)] for sample in output.outputs])
    metrics = output.metrics
    assert metrics.num_verified_tokens > metrics.num_accepted_tokens > 300
    assert_distribution(drawn, list(law.values()))


def choice_law(llm: LLM, args: dict[str, Any]) -> dict[tuple[int, ...], float]:
    """Probability of each output: of every token that is possible behind every prefix, multiplied."""
    law: dict[tuple[int, ...], float] = {}
    prefixes: list[tuple[tuple[int, ...], float]] = [((), 1.0)]
    while prefixes:
        prefix, mass = prefixes.pop()
        params = SamplingParams(
            max_tokens=len(prefix) + 1, golden_token_ids=prefix, logprobs=20, seed=1, so_args=args
        )
        (output,) = generate(llm, [PROMPT], params)
        for token, value in output.outputs[0].logprobs[len(prefix)].items():
            if token == 1:
                law[(*prefix, token)] = mass * math.exp(value.logprob)
            else:
                prefixes.append(((*prefix, token), mass * math.exp(value.logprob)))
    return law
