"""Drafts under grammars: chosen under masks, so that they stand, and masks that nobody waits for."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

import pytest

from deepinfer.entrypoints.llm import LLM
from deepinfer.outputs import RequestOutput
from deepinfer.sampling_params import SamplingParams
from deepinfer.settings import Settings
from deepinfer.structured_output.sequence import SequenceGrammar
from deepinfer.structured_output.step import StepGrammars
from tests.engine.matrix import bundled_prompts
from tests.engine.structured import PROMPT, SHAPES, regex
from tests.support.engines import facts, generate, make_llm


def accepted_share(outputs: list[RequestOutput]) -> float:
    """Of the drafts that were verified."""
    metrics = [output.metrics for output in outputs]
    return sum(each.num_accepted_tokens for each in metrics) / sum(
        each.num_verified_tokens for each in metrics
    )


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_masks_while_drafting_keep_the_acceptance_up(temperature: float, monkeypatch: pytest.MonkeyPatch):
    """Without them outputs are the same, and most drafts are refused."""
    number = {"schema_type": "regex", "schema": "[0-9]{3}(-[0-9]{4}){5}"}
    params = [
        SamplingParams(max_tokens=44, temperature=temperature, seed=row, so_args=args)
        for row, args in enumerate([SHAPES["ebnf"], SHAPES["regex"], number] * 3)
    ]
    prompts = [list(prompt) for prompt in bundled_prompts()[: len(params)]]
    with make_llm("v41-tiny") as llm:
        masked = generate(llm, prompts, params)
        monkeypatch.setattr(StepGrammars, "drafting", lambda *_: None)
        free = generate(llm, prompts, params)
    assert facts(masked) == facts(free)
    assert accepted_share(masked) > 2 * accepted_share(free)


def test_the_only_token_is_the_draft():
    """A forced trigger: every step emits all its drafts and one token more."""
    with make_llm("v41-tiny", settings=Settings(num_draft_tokens=5)) as llm:
        bound = first_token(llm)
        args = {
            "schema_type": "regex",
            "schema": "a",
            "trigger_token_ids": list(range(2000, 2018)),
            "bound_token_id": bound,
        }
        params = SamplingParams(max_tokens=19, temperature=0, so_args=args)
        (output,) = generate(llm, [PROMPT], params)
    assert output.outputs[0].token_ids == [bound, *range(2000, 2018)]
    assert output.metrics.num_verified_tokens == output.metrics.num_accepted_tokens == 15


def first_token(llm: LLM) -> int:
    (output,) = generate(llm, [PROMPT], SamplingParams(max_tokens=1, temperature=0))
    return output.outputs[0].token_ids[0]


@pytest.mark.parametrize("num_drafts", [0, 5])
@pytest.mark.parametrize("is_async", [False, True])
def test_masks_are_made_beside_the_step(num_drafts: int, is_async: bool, monkeypatch: pytest.MonkeyPatch):
    """By a thread of their own, under the device's work; the step finds them there."""
    fills: Counter[str] = Counter()
    real = SequenceGrammar._fill

    def fill(self: SequenceGrammar) -> Any:
        fills[threading.current_thread().name.partition("_")[0]] += 1
        return real(self)

    monkeypatch.setattr(SequenceGrammar, "_fill", fill)
    settings = Settings(num_draft_tokens=num_drafts, use_async_scheduling=is_async)
    with make_llm("v41-tiny", settings=settings) as llm:
        outputs = generate(llm, [PROMPT] * 3, regex("[a-z]{3}( [a-z]{4}){3}", temperature=1.0, seed=1))
    assert {output.outputs[0].finish_reason for output in outputs} == {"stop"}
    assert set(fills) == {"deepinfer-masks"} and fills["deepinfer-masks"] > 30, fills
