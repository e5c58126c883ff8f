"""Bounded replay in an engine: what a request gets does not depend on how it is run, and rows really go."""

from __future__ import annotations

import functools

import pytest

from deepinfer.engine.arg_utils import EngineArgs
from deepinfer.entrypoints.llm import LLM
from deepinfer.models.deepseek_v41.spec import model_spec
from deepinfer.sampling_params import SamplingParams
from deepinfer.settings import Settings
from tests.engine.equalities import Case, Outcome, cases_of, differences, run_alone, run_together
from tests.engine.test_preemption import PreemptingCore
from tests.support.engines import assert_idle, facts, generate, greedy, make_llm, prompt_of, watched
from tests.support.models import load_config

KEEP = 134
PLAIN = {"num_draft_tokens": 0, "use_async_scheduling": False}
# One below, at and above: a window, K, two blocks, and K behind a block.
LENGTHS = tuple(n + side for n in (128, KEEP, 256, 128 + KEEP) for side in (-1, 0, 1)) + (140, 270)
CASES = tuple(cases_of((1, 128, 133, 134, 135, 141, 256, 263, 300)))


def settings_of(mode: str, keep: int = KEEP, **options) -> Settings:
    return Settings(replay_mode=mode, replay_keep_tokens=keep, **options)


def llm_of(mode: str, **limits) -> LLM:
    return make_llm(settings=settings_of(mode), **limits)


@functools.cache
def expected() -> Outcome:
    with make_llm(settings=settings_of("compact", **PLAIN)) as llm:
        return run_alone(llm, CASES)


def test_compact_is_mask_and_removes_rows():
    """Lengths around the window, K and two blocks; prompts of one step, then tokens with drafts."""
    prompts = [list(prompt_of(length)) for length in LENGTHS]
    results, rows = {}, {}
    for mode in ("off", "mask", "compact"):
        with llm_of(mode, enable_prefix_caching=False) as llm:
            counters = llm.llm_engine.model_runner._model.counters
            counters.reset()
            generate(llm, prompts, greedy(1))  # no decode step
            rows[mode] = list(counters.kv_rows)
            results[mode] = facts(generate(llm, prompts, greedy(8, logprobs=3)))
    assert results["mask"] == results["compact"]
    total, kept = sum(LENGTHS), sum(min(length, KEEP) for length in LENGTHS)
    assert rows["compact"] == [total] * 4 + [kept] * 3 + [sum(min(length, 128) for length in LENGTHS)]
    assert rows["mask"] == [total] * 8
    assert rows["off"][:7] == [total] * 6 + [sum(min(length, 255) for length in LENGTHS)]
    for length, cut, exact in zip(LENGTHS, results["compact"], results["off"], strict=True):
        assert (cut == exact) == (length <= KEEP), f"{length=}"


@pytest.mark.parametrize(
    ("limits", "options"),
    [
        ({}, {}),
        ({}, {"use_async_scheduling": False, "num_draft_tokens": 0}),
        ({"max_num_batched_tokens": 128, "max_num_seqs": 8}, {}),
        ({"max_num_batched_tokens": 129, "max_num_seqs": 8}, {}),
        ({"max_num_batched_tokens": 50, "max_num_seqs": 6}, {}),
    ],
)
def test_batches_chunks_and_drafts_change_nothing(limits, options):
    with make_llm(settings=settings_of("compact", **options), **limits) as llm:
        actual = run_together(llm, CASES)
    assert not differences(CASES, actual, expected())


# The first ones are cut no more when their outputs make them longer than K, the others cut where they were.
LONG_CASES = tuple(
    Case(length, ("greedy", "random")[place % 2], 12)
    for place, length in enumerate((124, 133, 134, 135, 262, 300))
)


@functools.cache
def long_expected() -> Outcome:
    with make_llm(settings=settings_of("compact", **PLAIN), enable_prefix_caching=False) as llm:
        return run_alone(llm, LONG_CASES)


@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("mode", ["mask", "compact"])
def test_preempted_is_not_preempted(mode, caching, seed):
    """What was cut follows from the prompt: recomputing prompt and outputs cuts the same."""
    limits = {"max_num_seqs": 6, "max_num_batched_tokens": 100, "preemption_mode": "recompute"}
    with llm_of(mode, enable_prefix_caching=caching, **limits) as llm:
        with watched(llm, PreemptingCore, seed, 0.3) as core:
            actual = run_together(llm, LONG_CASES)
        assert core.while_prefilling > 0 and core.while_decoding > 0
        assert_idle(llm)
        stats = llm.get_stats()
        assert stats.num_recomputed_rows > 0 and stats.num_swapped_out == 0
        computed = sum(case.length for case in LONG_CASES) + stats.num_recomputed_rows
        assert caching or stats.num_prefill_tokens >= computed
    assert not differences(LONG_CASES, actual, long_expected())


def test_prompts_that_are_scored_are_not_cut(seed):
    prompts = [list(prompt_of(length)) for length in (140, 270, 300)]
    scored = greedy(6, prompt_logprobs=1, logprobs=2)
    results = {}
    for mode in ("off", "compact"):
        with llm_of(mode, max_num_seqs=6, max_num_batched_tokens=100) as llm:
            counters = llm.llm_engine.model_runner._model.counters
            counters.reset()
            results[mode] = facts(generate(llm, prompts, scored))
            if mode == "compact":
                assert min(counters.kv_rows) >= 140 + 270 + 300
                mixed = [scored, greedy(6, logprobs=2), scored]
                together = facts(generate(llm, prompts, mixed))
                with watched(llm, PreemptingCore, seed, 0.3) as core:
                    again = facts(generate(llm, prompts, mixed))
                assert core.while_decoding + core.while_prefilling > 0
    assert results["compact"] == results["off"]
    assert [together[0], together[2]] == [results["off"][0], results["off"][2]]
    assert again == together


def test_n_samples_agree_with_single_requests():
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=6, ignore_eos=True, logprobs=1, n=3)
    prompt = list(prompt_of(280))
    with llm_of("compact") as llm:
        whole = generate(llm, [prompt], params)[0]
    with llm_of("mask", max_num_batched_tokens=100, max_num_seqs=4) as llm:
        assert facts(generate(llm, [prompt], params)) == facts([whole])


# The bound


@pytest.mark.parametrize(
    ("options", "max_backtracking", "least"),
    [({}, 6, 134), ({"num_draft_tokens": 0}, 1, 129), ({"max_backtracking_tokens": 20}, 20, 148)],
)
@pytest.mark.parametrize("mode", ["mask", "compact"])
def test_too_few_tokens_are_refused(mode, options, max_backtracking, least):
    for keep in (0, 127, least - 1):
        with pytest.raises(ValueError, match=f"KEEP_TOKENS={keep} ") as error:
            make_llm(settings=settings_of(mode, keep, **options))
        for part in (f"{least} tokens", "window of 128", f"the {max_backtracking} that", f"MODE={mode}"):
            assert part in str(error.value)
    make_llm(settings=settings_of(mode, least, **options)).close()


def test_off_ignores_the_number():
    spec = model_spec(load_config("v41-tiny"))
    config = EngineArgs.resolve_replay(settings_of("off", 3), spec, 6)
    assert (config.mode, config.keep_tokens) == ("off", 0)


def test_the_environment_names_the_mode():
    read = Settings.from_env(
        {"DEEPINFER_YOCO_PREFILL_TRUNCATION_MODE": "mask", "DEEPINFER_YOCO_PREFILL_KEEP_TOKENS": "150"}
    )
    assert (read.replay_mode, read.replay_keep_tokens) == ("mask", 150)
    with pytest.raises(ValueError, match="off, mask, compact"):
        Settings.from_env({"DEEPINFER_YOCO_PREFILL_TRUNCATION_MODE": "half"})
