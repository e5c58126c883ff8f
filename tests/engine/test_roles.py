"""Roles: a PROMPT and a COMPLETION engine together give what one engine gives, bit by bit."""

from __future__ import annotations

import time
from typing import Any

import pytest

from deepinfer.sampling_params import SamplingParams
from deepinfer.settings import Settings
from tests.support.engines import PLAIN_STEPS, facts, generate, make_llm, prompt_of
from tests.support.roles import engine_pair, run_pair

TEXT = "Once upon a time there was a brave girl"


def requests() -> dict[str, tuple[Any, SamplingParams]]:
    """Lengths around borders of blocks and groups, and every kind of sampling."""
    cases: dict[str, tuple[Any, SamplingParams]] = {}
    for length in (1, 2, 3, 4, 5, 127, 128, 129, 130, 255, 256, 257, 300, 641):
        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=2)
        cases[f"greedy {length}"] = list(prompt_of(length, length)), params
    for length in (7, 128, 200, 513):
        params = SamplingParams(
            temperature=0.9,
            top_p=0.95,
            max_tokens=10,
            min_tokens=4,
            seed=length,
            repetition_penalty=1.2,
            presence_penalty=0.3,
            frequency_penalty=0.2,
            logit_bias={5: 1.5, 9: -2.0},
            logprobs=1,
            prompt_logprobs=2,
        )
        cases[f"sampled {length}"] = list(prompt_of(length, length)), params
        cases[f"ratio {length}"] = cases[f"sampled {length}"][0], params.clone(verification="ratio")
    cases["text"] = TEXT, SamplingParams(temperature=0, max_tokens=40)
    cases["stop string"] = TEXT, SamplingParams(temperature=0, max_tokens=40, stop=["and", "the "])
    cases["golden"] = TEXT, SamplingParams(temperature=0, max_tokens=9, golden_token_ids=[7, -1, 9])
    cases["one token"] = TEXT, SamplingParams(temperature=0, max_tokens=1, logprobs=0)
    cases["first token stops"] = TEXT, SamplingParams(golden_token_ids=[11], stop_token_ids=[11])
    return cases


_plain: dict[str, Any] = {}  # what the plain engine gave for a request


def expected(cases: dict[str, tuple[Any, SamplingParams]], settings: Settings) -> list[Any]:
    """Facts of a NORMAL engine: of one with the same drafts where these decide, else of the plain one."""
    ratio = {name: case for name, case in cases.items() if case[1].verification == "ratio"}
    found = dict(zip(ratio, whole(ratio, settings), strict=True))
    missing = {name: case for name, case in cases.items() if name not in ratio and repr(case) not in _plain}
    for case, fact in zip(missing.values(), whole(missing, PLAIN_STEPS), strict=True):
        _plain[repr(case)] = fact
    return [found[name] if name in ratio else _plain[repr(case)] for name, case in cases.items()]


def whole(cases: dict[str, tuple[Any, SamplingParams]], settings: Settings) -> list[Any]:
    with make_llm(settings=settings) as llm:
        prompts, params = [prompt for prompt, _ in cases.values()], [params for _, params in cases.values()]
        return facts(generate(llm, prompts, params))


@pytest.mark.parametrize(
    ("transport", "use_async", "num_drafts"),
    [
        ("shared memory", True, 5),
        ("shared memory", False, 0),
        ("store", None, 5),
        ("store", True, 0),
        ("shared memory", False, 5),
    ],
)
def test_two_engines_equal_one(transport: str, use_async: bool | None, num_drafts: int) -> None:
    """`None` is each role's own default."""
    cases = requests()
    settings = Settings(use_async_scheduling=use_async, num_draft_tokens=num_drafts)
    wanted = expected(cases, settings)
    with engine_pair(transport, settings) as (prompt, completion):
        results = run_pair(prompt, completion, cases)
        assert facts([results[name] for name in cases]) == wanted
        num_local = sum(len(output.outputs[0].token_ids) == 1 for output in results.values())
        assert num_local >= 2  # they end where they begin
        for engine in (prompt, completion):
            assert engine.hand_off_stats.num_sequences == len(cases) - num_local
            assert engine.hand_off_stats.num_failed == 0
        assert prompt.hand_off_stats.num_bytes == completion.hand_off_stats.num_bytes > 0
        # One of them prefills and never decodes, the other one the other way round.
        assert completion.stats.num_prefill_steps == 0 and completion.stats.num_prefill_tokens == 0
        assert prompt.stats.num_prefill_steps == prompt.stats.num_steps
        assert sum(output.metrics.ttft_ms is not None for output in results.values()) == len(cases)


def several() -> dict[str, tuple[Any, SamplingParams]]:
    """Requests of several completions: all go on elsewhere, some, or none."""
    sampled = SamplingParams(temperature=1.0, seed=3, max_tokens=12, ignore_eos=True, logprobs=1)
    half = sampled.clone(n=5, stop_token_ids=list(range(0, 2000, 2)), logprobs=None)
    return {
        "three": (list(prompt_of(130, 1)), sampled.clone(n=3)),
        "many": (list(prompt_of(200, 2)), sampled.clone(n=9, presence_penalty=0.5)),
        "scored": (list(prompt_of(129, 3)), sampled.clone(n=3, prompt_logprobs=2)),
        "some end": (list(prompt_of(128, 4)), half),
        "some end, scored": (list(prompt_of(60, 5)), half.clone(prompt_logprobs=1, logprobs=2)),
        "none goes on": (list(prompt_of(60, 6)), sampled.clone(n=3, max_tokens=1)),
        "stop strings": (TEXT, SamplingParams(temperature=1.0, seed=5, n=4, max_tokens=30, stop=["e", "a"])),
        "ratio": (TEXT, sampled.clone(n=3, verification="ratio", max_tokens=6)),
    }


@pytest.mark.parametrize(
    ("use_async", "num_drafts", "max_num_seqs"), [(None, 5, 32), (True, 0, 4), (False, 2, 4)]
)
def test_several_completions(use_async: bool | None, num_drafts: int, max_num_seqs: int) -> None:
    cases = several()
    settings = Settings(use_async_scheduling=use_async, num_draft_tokens=num_drafts)
    wanted = expected(cases, settings)
    with engine_pair(settings=settings, max_num_seqs=max_num_seqs) as (prompt, completion):
        results = run_pair(prompt, completion, cases)
        for name, want in zip(cases, wanted, strict=True):
            assert facts([results[name]]) == [want], name
        assert len(results["many"].outputs) == 9
        lengths = [len(sample.token_ids) for sample in results["some end"].outputs]
        assert 1 in lengths and max(lengths) > 1
        num_prompts = sum(len(results[name].prompt_token_ids) for name in cases)
        assert prompt.stats.num_prefill_tokens < 2 * num_prompts, "a prompt is prefilled once, or found"
        assert completion.stats.num_prefill_tokens == 0
        assert prompt.hand_off_stats.num_sequences == completion.hand_off_stats.num_sequences > 20
        assert not prompt._hand_off._begun


def test_few_slots_and_blocks() -> None:
    """Room is short on both sides: hand-offs wait, and what was taken over is preempted and recomputed."""
    cases = {
        f"request {row}": (
            list(prompt_of(80 + 3 * row, row)),
            SamplingParams(temperature=0.7, seed=row, max_tokens=60, ignore_eos=True),
        )
        for row in range(12)
    }
    settings = Settings()
    wanted = expected(cases, settings)
    with engine_pair(settings=settings, max_num_seqs=4, max_model_len=512, num_blocks=8) as (
        prompt,
        completion,
    ):
        results = run_pair(prompt, completion, cases)
        assert facts([results[name] for name in cases]) == wanted
        assert completion.stats.num_preemptions > 0
        assert prompt.hand_off_stats.num_sequences == completion.hand_off_stats.num_sequences == 12


def test_equal_prompts_are_prefilled_once() -> None:
    """Forks of a prompt are handed off like the prompt itself, and are found in the cache afterwards."""
    prompt_ids = list(prompt_of(300, 3))
    cases = {
        str(seed): (prompt_ids, SamplingParams(temperature=1.0, seed=seed, max_tokens=12, logprobs=0))
        for seed in range(5)
    }
    wanted = expected(cases, Settings())
    with engine_pair() as (prompt, completion):
        for _ in range(2):
            results = run_pair(prompt, completion, cases)
            assert facts([results[name] for name in cases]) == wanted
        assert prompt.stats.num_prefill_tokens < 2 * len(prompt_ids)
        assert min(output.num_cached_tokens for output in results.values()) == 256


@pytest.mark.parametrize("use_async", [True, False])
def test_interrupted_steps(use_async: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of either engine fails at any of its stations: nothing is lost, tokens stay what they are."""
    cases = {
        f"request {row}": (
            list(prompt_of(60 + 30 * row, row)),
            SamplingParams(temperature=0.8, seed=row, max_tokens=12, logprobs=0, stop=["zzzz"] * (row % 2)),
        )
        for row in range(6)
    }
    settings = Settings(use_async_scheduling=use_async)
    wanted = expected(cases, settings)
    raised: list[str] = []
    with engine_pair(settings=settings) as (prompt, completion):
        for engine in (prompt, completion):
            for owner, name in (
                (engine._builder, "batch"),
                (engine._builder, "sampling"),
                (engine._assembler, "collect"),
                (engine._hand_off, "after_commit"),
                (engine._pools, "read"),
                (engine._pools, "write"),
            ):
                # A copy takes its time, so that the step goes on before it fails.
                delay = 0.1 if owner is engine._pools else 0.0
                fail_once(monkeypatch, owner, name, at=3, delay=delay, raised=raised)
        for name, (text, params) in cases.items():
            prompt.add_request(name, text, params)
        results: dict[str, Any] = {}
        num_failed, deadline = 0, time.monotonic() + 60
        while len(results) < len(cases):
            assert time.monotonic() < deadline
            for engine in (prompt, completion):
                try:
                    outputs = engine.step()
                except InterruptedError:
                    num_failed += 1
                    continue
                finally:
                    engine.core.check_integrity()
                for output in outputs:
                    if output.outputs[0].finish_reason != "handed_off":
                        results[output.request_id] = output
        assert num_failed >= 5 and {"read", "write"} <= set(raised)
        assert facts([results[name] for name in cases]) == wanted


def fail_once(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, *, at: int, delay: float, raised: list[str]
) -> None:
    """Let the call number `at` of a method fail."""
    method, count = getattr(owner, name), [0]

    def failing(*args: Any, **kwargs: Any) -> Any:
        count[0] += 1
        if count[0] == at:
            raised.append(name)
            time.sleep(delay)
            raise InterruptedError(f"{name} was interrupted")
        return method(*args, **kwargs)

    monkeypatch.setattr(owner, name, failing)
