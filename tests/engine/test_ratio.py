"""Ratio verification in the engine: the law of plain sampling, greedy outputs and neighbours left alone."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from deepinfer.entrypoints.llm import LLM
from deepinfer.runtime import model_runner
from deepinfer.sampling import verify
from deepinfer.sampling.philox import Domain
from deepinfer.sampling.ratio import DraftScores
from deepinfer.sampling_params import SamplingParams
from deepinfer.settings import Settings
from tests.sampling.rows import assert_distribution
from tests.support.engines import assert_idle, facts, make_llm, prompt_of
from tests.support.models import load_config

PROMPT = list(prompt_of(3, 5))
FIRST = 290  # forced first output token, so that every request samples behind the same prefix
TOKENS = [2930, 2487, 307, 3879]  # the only ones that may follow
P = (0.45, 0.25, 0.05, 0.25)  # made the law of the second output token at T = 1 by a logit bias
Q = (0.30, 0.05, 0.45, 0.20)  # laws of drafts
OTHER_Q = (0.10, 0.60, 0.10, 0.20)
NUM_SEEDS = 2000
STYLES = {"T=1": {"temperature": 1.0}, "T=0.7 top-p 0.9": {"temperature": 0.7, "top_p": 0.9}}


@functools.cache
def plain() -> LLM:
    """No drafts; log-probabilities are those of what a token is drawn from."""
    settings = Settings(num_draft_tokens=0)
    return make_llm("v41-tiny", settings=settings, max_model_len=256, logprobs_mode="processed")


@pytest.fixture(scope="module", autouse=True)
def close_engines() -> Iterator[None]:
    yield
    plain().close()
    for cached in (plain, bias, joint_law):
        cached.cache_clear()


def next_law(prefix: list[int], **options: Any) -> list[float]:
    """Probabilities of TOKENS behind the prompt and some outputs."""
    params = SamplingParams(
        golden_token_ids=prefix,
        max_tokens=len(prefix) + 1,
        logprobs=len(TOKENS),
        ignore_eos=True,
        allowed_token_ids=TOKENS,
        seed=1,
        **options,
    )
    (output,) = plain().generate([PROMPT], params, use_tqdm=False)
    position = output.outputs[0].logprobs[-1]
    return [math.exp(position[token].logprob) if token in position else 0.0 for token in TOKENS]


@functools.cache
def bias() -> dict[int, float]:
    law = next_law([FIRST], temperature=1.0)
    return {token: math.log(wanted / p) for token, wanted, p in zip(TOKENS, P, law)}


@functools.cache
def joint_law(style: str) -> Tensor:
    """[4, 4] probabilities of the second and the third token."""
    options = {"logit_bias": bias(), **STYLES[style]}
    third = [next_law([FIRST, second], **options) for second in TOKENS]
    return torch.tensor(next_law([FIRST], **options))[:, None] * torch.tensor(third)


class FixedDrafter:
    """The bundled drafter, but its drafts follow one of two laws, by parity of state slot + step."""

    def __init__(self, drafter: Any, laws: tuple[tuple[float, ...], ...]) -> None:
        self._drafter = drafter
        self._logits = torch.tensor(laws).log() - torch.tensor([bias()[token] for token in TOKENS])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._drafter, name)

    def propose(self, *args: Any) -> Any:
        *inputs, choose, num_drafts = args
        slots = args[2].long()

        def choose_by_q(step: int, logits: Tensor) -> Tensor:
            logits[:, TOKENS] = self._logits[(slots + step) % 2]
            return choose(step, logits)

        return self._drafter.propose(*inputs, choose_by_q, num_drafts)


def check_law(style: str, laws: tuple[tuple[float, ...], ...], num_tokens: int = 2) -> None:
    """The tokens behind the forced one, drafts for two in one step or one after the other."""
    params = SamplingParams(
        n=NUM_SEEDS,
        golden_token_ids=[FIRST],
        max_tokens=num_tokens + 2,  # drafts are never verified for the last one
        ignore_eos=True,
        seed=11,
        detokenize=False,
        allowed_token_ids=TOKENS,
        logit_bias=bias(),
        verification="ratio",
        **STYLES[style],
    )
    settings = Settings(num_draft_tokens=2)
    # Equal prompts that are forked run in lockstep; drafts are to meet prefills of others.
    options = {"max_num_seqs": 256, "max_model_len": 256, "enable_prefix_caching": False}
    with make_llm("v41-tiny", settings=settings, **options) as llm:
        runner, stats = llm.llm_engine.model_runner, llm.llm_engine.stats
        runner._drafter = FixedDrafter(runner._drafter, laws)
        (output,) = llm.generate([PROMPT], params, use_tqdm=False)
        assert_idle(llm)
        verified, accepted = stats.verified_by_position, stats.accepted_by_position
    tokens = torch.tensor([sample.token_ids[1 : 1 + num_tokens] for sample in output.outputs])
    places = (tokens[:, :, None] == torch.tensor(TOKENS)).int().argmax(-1)
    law = joint_law(style)
    assert_distribution(places[:, 0], law.sum(1).tolist())
    if num_tokens == 2:
        assert verified[0] > NUM_SEEDS and verified[1] >= NUM_SEEDS, "two drafts at first, then one again"
        assert 0 < accepted[1] < accepted[0] < verified[0]
        assert_distribution(places[:, 0] * len(TOKENS) + places[:, 1], law.flatten().tolist())


def test_the_law_is_what_it_should_be():
    law = joint_law("T=1")
    assert law.sum(1).tolist() == pytest.approx(P, abs=1e-4)
    cold = torch.tensor(P) ** (1 / 0.7)
    cold[2] = 0  # the nucleus ends before it
    assert joint_law("T=0.7 top-p 0.9").sum(1).tolist() == pytest.approx(
        (cold / cold.sum()).tolist(), abs=1e-4
    )


@pytest.mark.parametrize(("style", "laws"), [("T=1", (Q, Q)), ("T=0.7 top-p 0.9", (Q, OTHER_Q))])
def test_second_and_third_token_have_the_law_of_plain_sampling(style, laws):
    check_law(style, laws)


def test_one_noise_for_drafts_and_residuals_fails_the_test(monkeypatch):
    class Shared:
        ACCEPT, FRESH, RESIDUAL = Domain.ACCEPT, Domain.FRESH, Domain.DRAFT

    monkeypatch.setattr(verify, "Domain", Shared)
    with pytest.raises(AssertionError, match="chi-square"):
        check_law("T=1", (Q, Q), num_tokens=1)


def work(count: int, **options) -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts of various lengths and parameters with everything that touches the choice of a token."""
    shapes = [
        {},
        {"temperature": 0.7, "top_p": 0.9},
        {"presence_penalty": 0.5, "repetition_penalty": 1.2},
        {"logit_bias": {30: 2.0}, "min_p": 0.02, "top_k": 40},
        {"golden_token_ids": [-1, 40, 50, -1, 60]},
        {"min_tokens": 6, "stop_token_ids": [32, 33, 34, 265], "allowed_token_ids": list(range(20, 300))},
    ]
    prompts = [list(prompt_of(3 + 7 * row % 60, row)) for row in range(count)]
    params = [
        SamplingParams(
            seed=row, max_tokens=10 + row % 4, logprobs=2, **{**shapes[row % len(shapes)], **options}
        )
        for row in range(count)
    ]
    return prompts, params


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one whenever scores of drafts are kept."""
    calls: list[int] = []
    keep = DraftScores.keep

    def counted(self: DraftScores, slots: Tensor, step: int, scores: Tensor) -> None:
        calls.append(step)
        keep(self, slots, step, scores)

    monkeypatch.setattr(DraftScores, "keep", counted)
    return calls


@pytest.mark.parametrize("use_async", [False, True])
def test_scores_take_no_room_for_snapshots(use_async):
    """Two requests at a time pass through many slots; two rows of scores are enough, none is mixed up."""
    prompts = [list(prompt_of(130 + 7 * row, row)) for row in range(10)]
    params = [
        SamplingParams(
            temperature=0.9, seed=row, max_tokens=9 + row % 5, ignore_eos=True, verification="ratio"
        )
        for row in range(10)
    ]
    settings = Settings(use_async_scheduling=use_async)
    with make_llm(settings=settings, max_num_seqs=2, enable_prefix_caching=False) as llm:
        expected = facts(llm.generate(prompts, params, use_tqdm=False))
    with make_llm(settings=settings, max_num_seqs=2, num_prefix_states=20) as llm:
        engine = llm.llm_engine
        seen = set()
        batch = engine._builder.batch

        def watched_batch(plan):
            inputs = batch(plan)
            seen.update(inputs[0].state_slots.tolist())
            return inputs

        engine._builder.batch = watched_batch
        assert facts(llm.generate(prompts, params, use_tqdm=False)) == expected
        scores = engine.model_runner.draft_scores
        assert scores.is_allocated and scores.num_rows == 2 < len(seen)
        (item,) = [item for item in engine.memory_plan.items if item.name == "draft scores"]
        assert item.num_bytes == scores._table.nbytes


@pytest.mark.parametrize("use_async", [False, True])
def test_greedy_outputs_are_those_of_plain_decoding(use_async, kept):
    prompts, params = work(12, temperature=0.0, verification="ratio")
    settings = Settings(use_async_scheduling=use_async)
    with make_llm("v41-tiny", settings=settings) as llm:
        found = facts(llm.generate(prompts, params, use_tqdm=False))
        assert not kept
    with make_llm("v41-tiny", settings=Settings(num_draft_tokens=0)) as llm:
        assert facts(llm.generate(prompts, params, use_tqdm=False)) == found


@pytest.mark.parametrize("use_async", [False, True])
def test_coupled_requests_do_not_notice_ratio_neighbours(use_async, kept):
    prompts, params = work(12)
    with make_llm("v41-tiny", settings=Settings(use_async_scheduling=use_async)) as llm:
        alone = facts(llm.generate(prompts, params, use_tqdm=False))
        assert not kept
        neighbours = [param.clone(verification="ratio") for param in params]
        outputs = llm.generate(
            [prompt for prompt in prompts for _ in range(2)],
            [param for pair in zip(params, neighbours) for param in pair],
            use_tqdm=False,
        )
        assert_idle(llm)
        assert kept
        assert facts(outputs[::2]) == alone
        assert facts(outputs[1::2]) != alone
        assert all(output.outputs[0].error is None for output in outputs)
        assert any(output.metrics.num_accepted_tokens for output in outputs[1::2])


@pytest.mark.parametrize("mode", ["raw", "processed"])
def test_log_probabilities_are_those_of_the_emitted_tokens(mode):
    """Accepted, replaced and fresh tokens of ratio requests report what scoring their output reports."""
    prompts, params = work(12, verification="ratio")
    with make_llm("v41-tiny", logprobs_mode=mode) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    scoring = [
        param.clone(golden_token_ids=output.outputs[0].token_ids, max_tokens=len(output.outputs[0].token_ids))
        for param, output in zip(params, outputs)
    ]
    with make_llm("v41-tiny", logprobs_mode=mode, settings=Settings(num_draft_tokens=0)) as llm:
        scored = llm.generate(prompts, scoring, use_tqdm=False)
    for output, expected in zip(outputs, scored):
        found, wanted = output.outputs[0], expected.outputs[0]
        assert found.token_ids == wanted.token_ids
        assert (found.token_logprobs, found.logprobs) == (wanted.token_logprobs, wanted.logprobs)


def test_forced_tokens_override():
    prompts, params = work(6, verification="ratio", golden_token_ids=[40, 41, -1, 42, 43, 44, 45, -1])
    with make_llm("v41-tiny") as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    for output in outputs:
        tokens = output.outputs[0].token_ids
        assert tokens[:2] == [40, 41] and tokens[3:7] == [42, 43, 44, 45][: len(tokens[3:7])]


def test_few_logits_at_once_change_nothing(monkeypatch):
    prompts, params = work(12, verification="ratio")
    settings = Settings(use_async_scheduling=False)
    with make_llm("v41-tiny", settings=settings) as llm:
        whole = facts(llm.generate(prompts, params, use_tqdm=False))
        monkeypatch.setattr(model_runner, "LOGITS_BYTES", 5 * 4 * load_config("v41-tiny").vocab_size)
        assert facts(llm.generate(prompts, params, use_tqdm=False)) == whole


def test_the_engine_has_a_default():
    prompts, params = work(6)
    with make_llm("v41-tiny", verification="ratio", settings=Settings(use_async_scheduling=False)) as llm:
        found = facts(llm.generate(prompts, params, use_tqdm=False))
        explicit = [param.clone(verification="ratio") for param in params]
        assert facts(llm.generate(prompts, explicit, use_tqdm=False)) == found
        coupled = [param.clone(verification="coupled") for param in params]
        assert facts(llm.generate(prompts, coupled, use_tqdm=False)) != found
    with pytest.raises(ValueError, match="verification='exact': choose one of coupled, ratio"):
        make_llm("v41-tiny", verification="exact")


def test_without_drafts_both_are_plain_sampling():
    prompts, params = work(6)
    ratio = [param.clone(verification="ratio") for param in params]
    llm = plain()
    assert facts(llm.generate(prompts, ratio, use_tqdm=False)) == facts(
        llm.generate(prompts, params, use_tqdm=False)
    )
