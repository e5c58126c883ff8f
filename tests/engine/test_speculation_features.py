"""Everything a request may ask for works inside runs of accepted drafts as it does token by token.

Each request runs in the plain engine and in speculating ones; all that a caller sees has to be the same.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

from deepinfer.outputs import RequestOutput
from deepinfer.sampling_params import SamplingParams
from deepinfer.settings import Settings
from tests.engine.matrix import bundled_prompts
from tests.support.engines import PLAIN_STEPS, WatchedCore, assert_idle, facts, generate, make_llm, watched

ENGINES = {
    "5 drafts": Settings(num_draft_tokens=5, use_async_scheduling=False),
    "5 drafts, async": Settings(num_draft_tokens=5, use_async_scheduling=True),
    "2 drafts, async": Settings(num_draft_tokens=2, use_async_scheduling=True),
    "async": Settings(num_draft_tokens=0, use_async_scheduling=True),
}
QUESTION, STORY, SECOND_STORY = 0, 12, 14  # of the bundled prompts; their drafts are good
GREEDY: dict[str, Any] = {"temperature": 0}
RANDOM: dict[str, Any] = {"temperature": 1.0, "seed": 3}
IMAGE_TOKEN = 14


class CutCore(WatchedCore):
    """Counts emitted tokens, to see how many of them were behind an end.

    Attributes:
        num_emitted: by the steps of sequences that had not ended.
    """

    def __init__(self, core: Any) -> None:
        super().__init__(core)
        self.num_emitted = 0

    def commit(self, plan: Any, tokens: Any, **results: Any) -> Any:
        result = self._core.commit(plan, tokens, **results)
        new = result.num_new_tokens
        emitted = new if plan.is_prefill else results["num_emitted"]
        self.num_emitted += int(emitted[new > 0].sum())
        return result


@pytest.fixture(scope="module")
def plain() -> Iterator[Any]:
    with make_llm("v41-tiny", settings=PLAIN_STEPS) as llm:
        yield llm


@pytest.fixture(scope="module", params=ENGINES)
def drafting(request: pytest.FixtureRequest) -> Iterator[Any]:
    with make_llm("v41-tiny", settings=ENGINES[request.param]) as llm:
        yield llm


def prompt(place: int) -> list[int]:
    return list(bundled_prompts()[place])


Rows = list[tuple[int, SamplingParams]]  # index of a bundled prompt, and parameters


def run(llm: Any, rows: Rows) -> list[RequestOutput]:
    return generate(llm, [prompt(place) for place, _ in rows], [params for _, params in rows])


# What each plain engine gave for the rows it has run; gone with the engine.
_expected: weakref.WeakKeyDictionary[Any, dict[Any, list[RequestOutput]]] = weakref.WeakKeyDictionary()


def run_once(plain: Any, rows: Rows) -> list[RequestOutput]:
    known = _expected.setdefault(plain, {})
    if tuple(rows) not in known:
        known[tuple(rows)] = run(plain, rows)
    return known[tuple(rows)]


def check_same(plain: Any, drafting: Any, rows: Rows) -> tuple[list[RequestOutput], int]:
    """Runs the rows in both engines; the outputs, and how many tokens were emitted behind an end."""
    expected = run_once(plain, rows)
    with watched(drafting, CutCore) as core:
        actual = run(drafting, rows)
    for (place, params), got, want in zip(rows, facts(actual), facts(expected), strict=True):
        assert got == want, f"prompt {place}, {params}:\n{got}\ninstead of\n{want}"
    is_drafting = drafting.llm_engine.scheduler_config.num_draft_tokens > 0
    assert (sum(output.metrics.num_accepted_tokens for output in actual) > 0) == is_drafting
    num_tokens = sum(len(sample.token_ids) for output in actual for sample in output.outputs)
    return expected, core.num_emitted - num_tokens


@functools.cache
def plain_text(style: str, place: int = STORY, num_tokens: int = 40) -> tuple[list[int], str]:
    """Tokens and text that the plain engine gives."""
    shape = {"greedy": GREEDY, "random": RANDOM}[style]
    with make_llm("v41-tiny", settings=PLAIN_STEPS) as llm:
        (output,) = run(llm, [(place, SamplingParams(max_tokens=num_tokens, ignore_eos=True, **shape))])
    return output.outputs[0].token_ids, output.outputs[0].text


def is_cut(drafting: Any) -> bool:
    """Whether an engine emits several tokens per step, of which the last may not count."""
    return drafting.llm_engine.scheduler_config.num_draft_tokens > 0


# --- choice of tokens ---------------------------------------------------------------------------------------

FEATURES: dict[str, dict[str, Any]] = {
    "repetition": {"repetition_penalty": 1.3},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 0.7},
    "negative penalties": {"presence_penalty": -0.5, "frequency_penalty": -0.5, "repetition_penalty": 0.9},
    "bias": {"logit_bias": {275: 1.5, 29: -2.0, 236: float("-inf")}},
    "strong bias": {"logit_bias": {275: 100.0}},
    "allowed": {"allowed_token_ids": [29, 275, 322, 104, 513, 1, 40]},
    "min_p": {"min_p": 0.1},
    "top_p": {"top_p": 0.8},
    "top_k": {"top_k": 3},
    "everything cut": {"top_p": 0.95, "top_k": 20, "min_p": 0.02},
    "hot": {"temperature": 1.7, "seed": 7},
    "cold": {"temperature": 0.2, "seed": 8},
    "logprobs": {"logprobs": 5},
    "prompt logprobs": {"prompt_logprobs": 2, "logprobs": 0},
    "n": {"n": 3, "logprobs": 1},
    "no EOS at first": {"first_n_token_no_eos": 9, "ignore_eos": False},
    "minimum": {"min_tokens": 15, "ignore_eos": False},
    "no text": {"detokenize": False},
    "all together": {
        "repetition_penalty": 1.1,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.2,
        "logit_bias": {275: 1.0, 29: -1.0},
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.01,
        "min_tokens": 4,
        "logprobs": 3,
        "prompt_logprobs": 1,
        "n": 2,
    },
}


def test_features_of_choice(plain, drafting):
    """Each greedy and at random, on one of two prompts in turn."""
    rows = [
        (place, SamplingParams(**({"max_tokens": 22, "ignore_eos": True, "logprobs": 0} | shape | options)))
        for row, options in enumerate(FEATURES.values())
        for place, shape in zip((QUESTION, STORY), (GREEDY, RANDOM) if row % 2 else (RANDOM, GREEDY))
    ]
    expected, _ = check_same(plain, drafting, rows)
    assert len({tuple(output.outputs[0].token_ids) for output in expected}) > 16


@pytest.mark.parametrize("mode", ["temperature", "processed"])
def test_what_log_probabilities_mean(mode):
    shapes = (GREEDY, RANDOM, {"temperature": 0.7, "top_p": 0.9, "seed": 5, "repetition_penalty": 1.2})
    rows = [(STORY, SamplingParams(max_tokens=20, logprobs=4, prompt_logprobs=2, **s)) for s in shapes]
    with make_llm("v41-tiny", settings=PLAIN_STEPS, logprobs_mode=mode) as one:
        for settings in ENGINES.values():
            with make_llm("v41-tiny", settings=settings, logprobs_mode=mode) as other:
                check_same(one, other, rows)


def test_log_probabilities_are_those_of_scoring_the_text(drafting):
    """Teacher forcing: prompt and output, given as a prompt, get the same values bit for bit."""
    params = SamplingParams(max_tokens=40, temperature=1.0, seed=9, logprobs=3, ignore_eos=True)
    places = (QUESTION, STORY, SECOND_STORY, 40)
    sampled = run(drafting, [(place, params) for place in places])
    scoring = SamplingParams(max_tokens=1, temperature=1.0, seed=9, prompt_logprobs=3)
    scored = generate(
        drafting, [output.prompt_token_ids + output.outputs[0].token_ids for output in sampled], scoring
    )
    for output, score in zip(sampled, scored, strict=True):
        sample = output.outputs[0]
        assert score.prompt_token_logprobs[-40:] == sample.token_logprobs
        assert score.prompt_logprobs[-40:] == sample.logprobs


def test_forced_tokens(plain, drafting):
    """Some as the model would choose, some against it, some free; tokens of images end n-gram windows."""
    tokens, _ = plain_text("greedy")
    free = [-1] * 30
    forced = {
        "as it would be": tokens[:20],
        "every third": [t if i % 3 else -1 for i, t in enumerate(tokens[:24])],
        "against it": [100 + i if i % 5 == 4 else -1 for i in range(24)],
        "one late": [*free[:11], 500, *free[12:]],
        "images": [*free[:3], IMAGE_TOKEN, *free[4:9], IMAGE_TOKEN, 70, *free[11:]],
    }
    rows = [
        (STORY, SamplingParams(max_tokens=30, golden_token_ids=ids, logprobs=1, ignore_eos=True, **shape))
        for ids in forced.values()
        for shape in (GREEDY, RANDOM)
    ]
    expected, _ = check_same(plain, drafting, rows)
    for output, (_, params) in zip(expected, rows, strict=True):
        for got, want in zip(output.outputs[0].token_ids, params.golden_token_ids):
            assert want in (-1, got)


# --- ends ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("style", ["greedy", "random"])
def test_exact_counts(plain, drafting, style):
    shape = {"greedy": GREEDY, "random": RANDOM}[style]
    tokens, _ = plain_text(style)
    rows = [(STORY, SamplingParams(max_tokens=n, ignore_eos=True, logprobs=1, **shape)) for n in range(1, 14)]
    expected, _ = check_same(plain, drafting, rows)
    for count, output in enumerate(expected, 1):
        (sample,) = output.outputs
        assert (sample.token_ids, sample.finish_reason) == (tokens[:count], "length")


@functools.cache
def up_to_the_end(settings: Settings) -> list[RequestOutput]:
    """Outputs of prompts that leave room for 1 ... 13 tokens."""
    limit = 140
    joined = [token for place in range(STORY, 32) for token in prompt(place)[1:]]
    prompts = [[0, *joined[: limit - 1 - room]] for room in range(1, 14)]
    with make_llm("v41-tiny", settings=settings, max_model_len=limit, num_blocks=28) as llm:
        params = SamplingParams(max_tokens=None, ignore_eos=True, logprobs=1, **GREEDY)
        return generate(llm, prompts, params)


def test_the_context_ends_inside_a_run(plain, drafting):
    """Room for 1 ... 13 tokens behind the prompt."""
    settings = Settings(
        num_draft_tokens=drafting.llm_engine.scheduler_config.num_draft_tokens,
        use_async_scheduling=drafting.llm_engine._is_async,
    )
    outputs = up_to_the_end(settings)
    assert facts(outputs) == facts(up_to_the_end(PLAIN_STEPS))
    for room, output in enumerate(outputs, 1):
        assert len(output.outputs[0].token_ids) == room
        assert output.outputs[0].finish_reason == "length"


@pytest.mark.parametrize("style", ["greedy", "random"])
def test_stop_tokens_inside_a_run(plain, drafting, style):
    """Each token of two runs in turn stops them, as a stop token, as EOS, and not before the minimum."""
    shape = {"greedy": GREEDY, "random": RANDOM}[style]
    tokens, _ = plain_text(style)
    rows: Rows = []
    for place in range(12):
        stop = {"stop_token_ids": [tokens[place]]}
        for options in (stop, {"eos_id": tokens[place]}, stop | {"min_tokens": place + 2}):
            rows.append((STORY, SamplingParams(max_tokens=30, logprobs=0, **shape, **options)))
    expected, num_cut = check_same(plain, drafting, rows)
    assert (num_cut > 0) == is_cut(drafting)
    for (_, params), output in zip(rows, expected, strict=True):
        (sample,) = output.outputs
        ids = params.stop_token_ids or (params.eos_id,)
        if params.min_tokens == 0:
            assert sample.token_ids == tokens[: tokens.index(ids[0]) + 1] and sample.finish_reason == "stop"
            assert sample.stop_reason == (ids[0] if params.stop_token_ids else None)
        else:
            assert len(sample.token_ids) >= params.min_tokens


@pytest.mark.parametrize("style", ["greedy", "random"])
def test_stop_strings_inside_a_run(plain, drafting, style):
    """Pieces of the text that begin anywhere; what is reported ends with the token that ends the text."""
    shape = {"greedy": GREEDY, "random": RANDOM}[style]
    _, text = plain_text(style)
    rows = [
        (
            STORY,
            SamplingParams(max_tokens=40, logprobs=0, ignore_eos=True, stop=text[at : at + size], **shape),
        )
        for at in range(3, 60, 4)
        for size in (1, 4)
    ]
    rows += [
        (STORY, rows[5][1].clone(include_stop_str_in_output=True)),
        (STORY, rows[9][1].clone(min_tokens=12)),
        (STORY, rows[9][1].clone(stop=["no such thing", *rows[9][1].stop], n=2)),
    ]
    expected, num_cut = check_same(plain, drafting, rows)
    assert (num_cut > 0) == is_cut(drafting)
    for (_, params), output in zip(rows[:30], expected, strict=False):
        (sample,) = output.outputs
        assert (sample.finish_reason, sample.stop_reason) == ("stop", params.stop[0])
        assert sample.text == text[: text.index(params.stop[0])]
        assert len(sample.token_logprobs) == len(sample.token_ids) < 40


def test_eos_inside_a_run(plain, drafting):
    """Questions, which the model answers and ends by itself."""
    rows = [
        (place, SamplingParams(max_tokens=64, logprobs=0, **shape))
        for place in range(12)
        for shape in (GREEDY, RANDOM)
    ]
    expected, num_cut = check_same(plain, drafting, rows)
    assert sum(output.outputs[0].finish_reason == "stop" for output in expected) > 8
    assert (num_cut > 0) == is_cut(drafting)


# --- steps from outside -------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_steps", [0, 1, 2, 4, 7])
def test_abort_after_some_steps(plain, drafting, num_steps):
    """What an aborted request has so far is the beginning of its text; its neighbour does not notice."""
    engine = drafting.llm_engine
    params = SamplingParams(max_tokens=60, ignore_eos=True, logprobs=1, **RANDOM)
    whole = facts(run_once(plain, [(STORY, params), (SECOND_STORY, params)]))
    engine.add_request("stays", prompt(STORY), params)
    engine.add_request("goes", prompt(SECOND_STORY), params)
    for _ in range(num_steps):
        assert engine.step() == []
    assert engine.abort_request("goes") == 1 and engine.abort_request("goes") == 0
    done: dict[str, RequestOutput] = {}
    while engine.has_unfinished_requests():
        done.update((output.request_id, output) for output in engine.step())
    engine.settle()
    assert_idle(drafting)
    assert facts([done["stays"]]) == whole[:1]
    (sample,) = done["goes"].outputs
    count = len(sample.token_ids)
    _, tokens, _, values, *_ = whole[1][3][0]
    assert sample.finish_reason == "abort"
    assert (sample.token_ids, sample.token_logprobs) == (tokens[:count], values[:count])
    assert count >= num_steps - engine._is_async, "a step may be in flight"
    assert len(sample.logprobs) == count


def test_streams_grow_and_end_as_the_whole(plain, drafting):
    """Each state continues the one before it; the last one is the plain result."""
    rows = [
        (place, SamplingParams(max_tokens=30, logprobs=1, **shape))
        for place in (QUESTION, STORY)
        for shape in (GREEDY, RANDOM, GREEDY | {"stop": "ay"})
    ]
    expected = facts(run_once(plain, rows))
    engine = drafting.llm_engine
    for row, (place, params) in enumerate(rows):
        engine.add_request(str(row), prompt(place), params, stream=True)
    seen: dict[int, RequestOutput] = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            row = int(output.request_id)
            (new,) = output.outputs
            if row in seen:
                (old,) = seen[row].outputs
                # A stop string may take back tokens that were shown; text is never taken back.
                assert new.text.startswith(old.text)
                if new.finish_reason != "stop":
                    assert new.token_ids[: len(old.token_ids)] == old.token_ids
                assert (
                    new.token_logprobs[: len(old.token_logprobs)] == old.token_logprobs[: len(new.token_ids)]
                )
            seen[row] = output
    engine.settle()
    assert_idle(drafting)
    assert facts([seen[row] for row in range(len(rows))]) == expected


def test_small_chunks_and_a_small_pool(plain):
    """Prompts in pieces, evictions and every feature at once."""
    rows = [
        (
            place,
            SamplingParams(**({"max_tokens": 130, "ignore_eos": True} | shape | FEATURES["all together"])),
        )
        for place, shape in ((STORY, GREEDY), (SECOND_STORY, RANDOM), (33, RANDOM), (36, GREEDY))
    ]
    expected = facts(run(plain, rows))
    settings = ENGINES["5 drafts, async"]
    # 8 sequences that come to need two blocks each, in a pool of 6.
    options = {"max_num_seqs": 8, "max_num_batched_tokens": 96, "num_blocks": 7, "max_model_len": 512}
    with make_llm("v41-tiny", settings=settings, **options) as llm:
        assert facts(run(llm, rows)) == expected
        assert llm.llm_engine.stats.num_preemptions > 0
