"""A preempted request ends like one that never was: its tokens are recomputed, not chosen again."""

from __future__ import annotations

import functools
import random
from typing import Any

import pytest

from deepinfer.sampling_params import SamplingParams
from tests.engine.equalities import Case, Outcome, differences, run_alone, run_together
from tests.support.engines import (
    PLAIN_STEPS,
    WatchedCore,
    assert_idle,
    facts,
    generate,
    make_cold_llm,
    prompt_of,
    watched,
)

CASES = tuple(
    Case(length, style, num_outputs=10)
    for length, style in [
        (1, "random"),
        (9, "greedy"),
        (63, "nucleus"),
        (64, "greedy"),
        (127, "random"),
        (128, "nucleus"),
        (129, "greedy"),
        (200, "random"),
        (256, "greedy"),
        (258, "nucleus"),
        (300, "greedy"),
    ]
)


@functools.cache
def expected(model: str) -> Outcome:
    with make_cold_llm(model, settings=PLAIN_STEPS) as llm:
        return run_alone(llm, CASES)


class PreemptingCore(WatchedCore):
    """Preempts running sequences at random, before any step.

    Attributes:
        while_prefilling, while_decoding: how often a sequence of the last plan lost its place.
    """

    def __init__(self, core: Any, seed: int, rate: float) -> None:
        super().__init__(core)
        self._order = random.Random(seed)
        self._rate = rate
        self.while_prefilling = self.while_decoding = 0

    def before_plan(self) -> None:
        if not self.plans or self._order.random() > self._rate:
            return
        seq_id = self._order.choice(self.plans[-1].seq_ids.tolist())
        try:
            prefills = self.num_computed_tokens(seq_id) < self.num_prompt_tokens(seq_id)
            if self.preempt(seq_id):
                self.while_prefilling += prefills
                self.while_decoding += not prefills
        except KeyError:  # it has ended
            return


@pytest.mark.parametrize("model", ["v41-tiny", "tiny-quant"])
def test_preempted_at_random_points(model, seed):
    limits = {"max_num_seqs": 6, "max_num_batched_tokens": 100, "preemption_mode": "recompute"}
    with make_cold_llm(model, **limits) as llm, watched(llm, PreemptingCore, seed, 0.4) as core:
        actual = run_together(llm, CASES)
        assert core.while_prefilling > 0 and core.while_decoding > 0
        assert_idle(llm)
        assert llm.get_stats().num_recomputed_rows > 0 and llm.get_stats().num_swapped_out == 0
    assert not differences(CASES, actual, expected(model))


def test_preempted_for_lack_of_blocks():
    """Eight requests of one block each are admitted; most need a second one before they end."""
    lengths = (60, 86, 88, 89, 90, 91, 93, 95)
    prompts = [prompt_of(length) for length in lengths]
    params = [
        SamplingParams(temperature=place % 2, seed=place, max_tokens=48, ignore_eos=True, logprobs=1)
        for place in range(len(lengths))
    ]
    with make_cold_llm(settings=PLAIN_STEPS) as llm:
        want = facts(generate(llm, prompts, params))
    limits = {"max_num_seqs": 8, "max_model_len": 256, "num_blocks": 12, "preemption_mode": "recompute"}
    with make_cold_llm(**limits) as llm:
        outputs = generate(llm, prompts, params)
        assert llm.llm_engine.stats.num_preemptions > 0
        counted = sum(output.metrics.num_preemptions for output in outputs)
        assert counted == llm.llm_engine.core.num_preemptions
    assert facts(outputs) == want


def test_scores_of_the_prompt_survive_preemption(seed):
    params = SamplingParams(temperature=0, max_tokens=3, prompt_logprobs=2, logprobs=2)
    prompts = [prompt_of(length) for length in (70, 129, 200)]
    with make_cold_llm(max_num_seqs=3, max_num_batched_tokens=50) as llm:
        want = facts(generate(llm, prompts, params))
        with watched(llm, PreemptingCore, seed, 0.3) as core:
            assert facts(generate(llm, prompts, params)) == want
        assert core.while_prefilling > 0


def test_preempted_requests_can_be_ended_instead():
    limits = {"max_num_seqs": 8, "max_model_len": 256, "num_blocks": 6, "stop_preempted_request": True}
    prompts = [prompt_of(length) for length in (90, 91, 93, 95)]
    params = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)
    with make_cold_llm(settings=PLAIN_STEPS) as llm:
        want = [output.outputs[0].token_ids for output in generate(llm, prompts, params)]
    with make_cold_llm(**limits) as llm:
        samples = [output.outputs[0] for output in generate(llm, prompts, params)]
    ended = [sample for sample in samples if sample.finish_reason == "error"]
    assert ended and len(ended) < len(samples)
    assert all(sample.error.kind == "preempted" for sample in ended)
    for sample, tokens in zip(samples, want, strict=True):
        assert sample.token_ids == tokens[: len(sample.token_ids)]
        assert sample.finish_reason == "error" or sample.token_ids == tokens
