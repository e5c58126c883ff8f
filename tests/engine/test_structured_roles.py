"""Structured requests between two engines, and the law of ratio verification."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from deepinfer.entrypoints.llm import LLM
from deepinfer.sampling_params import SamplingParams
from deepinfer.settings import Settings
from deepinfer.structured_output.builder import GrammarError, Ticket
from tests.engine.structured import PROMPT, SHAPES, regex
from tests.sampling.rows import assert_distribution
from tests.support.engines import PLAIN_STEPS, facts, generate, make_llm
from tests.support.roles import engine_pair, run_pair


@pytest.fixture(scope="module")
def plain() -> Iterator[LLM]:
    with make_llm("v41-tiny", settings=PLAIN_STEPS) as llm:
        yield llm


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
