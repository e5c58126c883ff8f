"""The prefix cache changes what is computed, never what comes out."""

from __future__ import annotations

import functools
import os
import random
import shutil
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from deepinfer.engine import parts
from deepinfer.entrypoints.llm import LLM
from deepinfer.runtime.caches import Caches
from deepinfer.sampling_params import SamplingParams
from deepinfer.settings import Settings
from tests.engine.equalities import Case, Outcome, differences, run_alone, run_together
from tests.engine.test_preemption import PreemptingCore
from tests.support.curves import believed
from tests.support.engines import (
    PLAIN_STEPS,
    assert_idle,
    facts,
    generate,
    greedy,
    make_llm,
    prompt_of,
    watched,
)
from tests.support.paths import MODELS

SETTINGS = {
    "plain": PLAIN_STEPS,
    "drafts": Settings(use_async_scheduling=False),
    "drafts, async": Settings(),
    "async": Settings(num_draft_tokens=0),
    "varlen, async": Settings(use_draft_budget=True),
}
# Around blocks, and around a window or a group of a ratio behind a border.
LENGTHS = (1, 127, 128, 129, 130, 131, 200, 254, 255, 256, 257, 258, 259, 383, 384, 385, 386)
CASES = tuple(
    Case(length, ("greedy", "random", "nucleus")[place % 3], num_outputs=4)
    for place, length in enumerate(LENGTHS)
)


@pytest.fixture(scope="module", autouse=True)
def step_times() -> Iterator[None]:
    """Engines with a draft budget do not measure the machine, which takes seconds."""
    with believed("modest"):
        yield


def border_of(length: int) -> int:
    """Where a prompt of this length resumes, if another one with these tokens came before."""
    return (length - 1) // 128 * 128


@functools.cache
def cold(model: str = "v41-tiny") -> Outcome:
    """Each case alone, in an engine that keeps nothing."""
    with make_llm(model, settings=PLAIN_STEPS, enable_prefix_caching=False) as llm:
        outcome = run_alone(llm, CASES)
        assert llm.llm_engine.prefix_cache_stats().num_blocks == 0
        return outcome


# Every length without drafts and with all there is; elsewhere they take turns. tiny-quant has no drafter.
@pytest.mark.parametrize(
    ("model", "name", "places"),
    [
        ("v41-tiny", "plain", slice(None)),
        ("v41-tiny", "drafts", slice(0, None, 3)),
        ("v41-tiny", "drafts, async", slice(None)),
        ("v41-tiny", "async", slice(1, None, 3)),
        ("v41-tiny", "varlen, async", slice(2, None, 3)),
        ("tiny-quant", "plain", slice(0, None, 2)),
        ("tiny-quant", "async", slice(1, None, 2)),
    ],
)
def test_a_hit_gives_the_same_bits(model, name, places):
    with make_llm(model, settings=SETTINGS[name]) as llm:
        for case, expected in zip(CASES[places], cold(model)[places], strict=True):
            llm.reset_prefix_cache()
            for found in (0, border_of(case.length)):
                before = llm.llm_engine.stats.num_prefill_tokens
                output = generate(llm, [list(case.prompt)], case.params)[0]
                assert not differences([case], [_as_outcome(output)], [expected])
                assert output.num_cached_tokens == output.metrics.num_cached_tokens == found
                assert llm.llm_engine.stats.num_prefill_tokens - before == case.length - found


def _as_outcome(output: Any) -> tuple[list[int], Any]:
    sample = output.outputs[0]
    return sample.token_ids, (sample.token_logprobs, sample.logprobs)


@pytest.mark.parametrize("name", ["plain", "drafts, async", "varlen, async"])
def test_hits_in_a_batch(name):
    """All cases at once, twice; prompts of equal lengths share what they can."""
    with make_llm(settings=SETTINGS[name], max_num_batched_tokens=600) as llm:
        for _ in range(2):
            assert not differences(CASES, run_together(llm, CASES), cold())
            assert_idle(llm)
        stats = llm.llm_engine.prefix_cache_stats()
        assert stats.num_hits >= 10
        assert llm.llm_engine.stats.num_prefill_tokens == stats.num_query_tokens - stats.num_hit_tokens


def test_no_row_of_the_hit_is_computed():
    """Rows by layer: the encoder runs what is behind the hit, no layer more than that."""
    with make_llm(settings=PLAIN_STEPS) as llm:
        prompt = list(prompt_of(700))
        generate(llm, [prompt], greedy(1))
        counters = llm.llm_engine.model_runner._model.counters
        counters.reset()
        output = generate(llm, [prompt], greedy(1))[0]
        assert output.num_cached_tokens == 640
        assert counters.kv_rows[0] == counters.query_rows[0] == 60
        assert max(counters.kv_rows) == max(counters.query_rows) == 60


@pytest.mark.parametrize(("chunk", "lengths"), [(100, (150, 257)), (128, (129, 300)), (4096, (129, 257))])
def test_drafts_behind_a_hit_are_the_same(chunk, lengths):
    """The drafter's context comes from the kept state: as many drafts stand as without a hit."""
    num_accepted = 0
    with make_llm(settings=SETTINGS["drafts"], max_num_seqs=4, max_num_batched_tokens=chunk) as llm:
        for length in lengths:
            llm.reset_prefix_cache()
            outputs = [generate(llm, [_text_prompt(length)], greedy(40))[0] for _ in range(2)]
            assert [output.num_cached_tokens for output in outputs] == [0, border_of(length)]
            one, other = (
                (o.outputs[0].token_ids, o.metrics.num_verified_tokens, o.metrics.num_accepted_tokens)
                for o in outputs
            )
            assert one == other
            num_accepted += one[2]
    assert num_accepted > 10


@functools.cache
def _text(llm_name: str = "v41-tiny") -> tuple[int, ...]:
    with make_llm(llm_name, max_num_seqs=1) as llm:
        text = "Once upon a time there was a brave girl who lived in a small house near the forest. "
        return tuple(llm.get_tokenizer().encode(text * 30))


def _text_prompt(length: int) -> list[int]:
    return list(_text()[:length])


@pytest.mark.parametrize("part", ["window", "encoder", "drafter", "blocks", "wrong slot"])
def test_each_part_of_a_copy_counts(part, monkeypatch):
    """One section left out of the copies, or a wrong source: a result or a count of drafts changes."""
    real_slots, real_blocks = Caches.copy_slots, Caches.copy_blocks

    def copy_slots(self: Caches, copies: torch.Tensor) -> None:
        windows = {w.layer_id: w for w in self.layout.windows}
        layers = {"window": [7], "encoder": [0], "drafter": [8, 9, 10]}.get(part, [])
        if part == "wrong slot":
            copies = torch.stack([copies[:, 0] % 40 + 1, copies[:, 1]], 1)
        kept = [self.window(layer)[copies[:, 1].long()].clone() for layer in layers]
        assert all(layer in windows for layer in layers)
        real_slots(self, copies)
        for layer, records in zip(layers, kept):
            self.window(layer)[copies[:, 1].long()] = records

    def copy_blocks(self: Caches, copies: torch.Tensor) -> None:
        if part != "blocks":
            real_blocks(self, copies)

    expected = _three_answers()
    assert expected[0] == expected[1] == expected[2] and expected[0][-1] > 5
    monkeypatch.setattr(Caches, "copy_slots", copy_slots)
    monkeypatch.setattr(Caches, "copy_blocks", copy_blocks)
    assert _three_answers.__wrapped__() != expected


@functools.cache
def _three_answers() -> list[Any]:
    """One prompt three times, its answers and how many drafts stood: computed, forked and found."""
    with make_llm(settings=SETTINGS["drafts"]) as llm:
        prompts = [_text_prompt(150), _text_prompt(150)]
        outputs = [
            *generate(llm, prompts, greedy(24, logprobs=1)),
            *generate(llm, prompts[:1], greedy(24, logprobs=1)),
        ]
        assert [o.num_cached_tokens for o in outputs] == [0, 149, 128]
        return [facts([o])[0][3] + [o.metrics.num_accepted_tokens] for o in outputs]


SAMPLED = {"temperature": 1.0, "seed": 7, "max_tokens": 6, "ignore_eos": True, "logprobs": 1}


@functools.cache
def _samples(length: int, count: int) -> list[Any]:
    """Facts of samples that are each computed."""
    params = SamplingParams(n=count, **SAMPLED)
    with make_llm(settings=PLAIN_STEPS, enable_prefix_caching=False) as llm:
        expected = facts(generate(llm, [list(prompt_of(length, 3))], params))
        assert llm.llm_engine.stats.num_prefill_tokens == count * length
        return expected


@pytest.mark.parametrize(
    ("length", "count"),
    [(1, 4), (2, 4), (127, 4), (128, 4), (129, 16), (130, 4), (255, 4), (256, 4), (257, 4)],
)
@pytest.mark.parametrize("name", ["plain", "drafts, async"])
def test_samples_are_prefilled_once(length, count, name):
    prompt, params = [list(prompt_of(length, 3))], SamplingParams(n=count, **SAMPLED)
    expected = _samples(length, count)
    with make_llm(settings=SETTINGS[name]) as llm:
        output = generate(llm, prompt, params)[0]
        assert facts([output]) == expected
        assert llm.llm_engine.stats.num_prefill_tokens == length + count - 1
        assert (output.num_cached_tokens, output.metrics.num_cached_tokens) == (0, length - 1)
        assert llm.llm_engine.prefix_cache_stats().num_forks == count - 1
        again = generate(llm, prompt, params)[0]
        assert facts([again]) == expected
        assert again.num_cached_tokens == border_of(length)


def test_samples_beside_a_scored_prompt():
    """The first sample scores the prompt and computes all of it; the others are forked from it."""
    prompt, params = [list(prompt_of(200))], SamplingParams(n=4, prompt_logprobs=1, **SAMPLED)
    with make_llm(settings=PLAIN_STEPS, enable_prefix_caching=False) as llm:
        expected = facts(generate(llm, prompt, params))
    with make_llm() as llm:
        for _ in range(2):
            assert facts(generate(llm, prompt, params)) == expected
        assert llm.llm_engine.stats.num_prefill_tokens == 2 * (200 + 3)


_computed_before: dict[str, list[Any]] = {}


def _computed(prompts: list[list[int]], params: Any) -> list[Any]:
    """Facts of requests whose every row the plain engine computes, found once for equal requests."""
    key = repr((prompts, params))
    if key not in _computed_before:
        with make_llm(settings=PLAIN_STEPS, enable_prefix_caching=False) as llm:
            _computed_before[key] = facts(generate(llm, prompts, params))
    return _computed_before[key]


@pytest.mark.parametrize("name", SETTINGS)
def test_duplicates_in_a_batch(name):
    prompts = [list(prompt_of(length, 1)) for length in (150, 90, 150, 300, 90, 150, 300)]
    params = [SamplingParams(**{**SAMPLED, "seed": seed}) for seed in range(len(prompts))]
    expected = _computed(prompts, params)
    with make_llm(settings=SETTINGS[name], max_num_batched_tokens=256) as llm:
        outputs = generate(llm, prompts, params)
        assert facts(outputs) == expected
        assert [output.num_cached_tokens for output in outputs] == [0, 0, 149, 0, 89, 149, 299]
        assert llm.llm_engine.stats.num_prefill_tokens == 150 + 90 + 300 + 4


def test_preempted_requests_find_themselves(seed):
    cases = [Case(length, "random", num_outputs=14) for length in (129, 200, 258, 300, 300)]
    with make_llm(settings=PLAIN_STEPS, enable_prefix_caching=False) as llm:
        expected = run_alone(llm, cases)
    limits = {"max_num_seqs": 6, "max_num_batched_tokens": 100, "preemption_mode": "recompute"}
    with make_llm(**limits) as llm, watched(llm, PreemptingCore, seed, 0.4) as core:
        actual = run_together(llm, cases)
        assert core.while_prefilling + core.while_decoding > 5
        assert core.prefix_cache_stats().num_hits > 2
        assert_idle(llm)
    assert not differences(cases, actual, expected)


def test_few_blocks_and_slots(seed):
    """Constant eviction, preemption and forks; the results are those of each request alone."""
    order = random.Random(seed)
    cases = [Case(order.choice((60, 129, 200, 258, 300, 384)), "random", num_outputs=12) for _ in range(16)]
    with make_llm(settings=PLAIN_STEPS, enable_prefix_caching=False) as llm:
        known = dict(zip(set(cases), run_alone(llm, list(set(cases)))))
        expected = [known[case] for case in cases]
    limits = {"max_num_seqs": 4, "max_model_len": 512, "num_blocks": 10, "num_prefix_states": 2}
    with make_llm(settings=Settings(num_state_slots_ratio=1.0), **limits) as llm:
        assert not differences(cases, run_together(llm, cases), expected)
        stats = llm.llm_engine.prefix_cache_stats()
        assert min(stats.num_hits, stats.num_forks, stats.num_evicted_blocks) > 0
        assert stats.num_evicted_snapshots > 0
        assert_idle(llm)


def talk(llm: Any) -> list[tuple[Any, int]]:
    """Three turns, each with all that was said before: outputs, and lengths of their prompts."""
    prompt, said = [], []
    for words in (prompt_of(115, 4), prompt_of(50, 5), prompt_of(131, 6)):
        prompt = prompt + list(words)
        output = generate(llm, [prompt], SamplingParams(**{**SAMPLED, "max_tokens": 24}))[0]
        said.append((output, len(prompt)))
        prompt = prompt + output.outputs[0].token_ids
    return said


@functools.cache
def cold_talk() -> list[Any]:
    with make_llm(settings=PLAIN_STEPS, enable_prefix_caching=False) as llm:
        return facts([output for output, _ in talk(llm)])


@pytest.mark.parametrize("name", ["plain", "drafts, async"])
def test_a_conversation_goes_on(name):
    """A prompt that holds the former one and its output resumes behind the former prompt at least."""
    with make_llm(settings=SETTINGS[name]) as llm:
        said = talk(llm)
    assert facts([output for output, _ in said]) == cold_talk()
    found = [output.num_cached_tokens for output, _ in said]
    assert found[0] == 0
    for place in (1, 2):
        assert found[place] >= border_of(said[place - 1][1])


def test_parting_prompts_and_intervals():
    """Prompts with a common beginning: the second leaves a state where it parts, or finds one on the way."""
    common = prompt_of(300)
    prompts = [[*common, *prompt_of(100, seed)] for seed in range(1, 4)]
    expected = _computed(prompts, greedy(4, logprobs=1))
    for interval, found in ((0, [0, 0, 256]), (128, [0, 256, 256])):
        with make_llm(prefix_state_interval=interval) as llm:
            outputs = [generate(llm, [prompt], greedy(4, logprobs=1))[0] for prompt in prompts]
            assert facts(outputs) == expected
            assert [output.num_cached_tokens for output in outputs] == found


def test_hits_with_bounded_replay():
    """Where windows begin depends on the prompt's length: only prompts of one length share what they can."""
    settings = Settings(replay_mode="compact", replay_keep_tokens=140)
    common = prompt_of(300)
    prompts = [[*common, *prompt_of(length, 1)] for length in (40, 40, 60, 60)] + [list(common)] * 2
    with make_llm(settings=settings, enable_prefix_caching=False) as llm:
        expected = facts(generate(llm, prompts, greedy(6, logprobs=1)))
    with make_llm(settings=settings) as llm:
        outputs = [generate(llm, [prompt], greedy(6, logprobs=1))[0] for prompt in prompts]
        assert facts(outputs) == expected
        assert [output.num_cached_tokens for output in outputs] == [0, 256, 0, 256, 0, 256]
        assert facts(generate(llm, prompts * 2, greedy(6, logprobs=1))) == expected * 2


def test_reset():
    prompt = list(prompt_of(200))
    with make_llm() as llm:
        engine = llm.llm_engine
        generate(llm, [prompt], greedy())
        engine.add_request("a", prompt, greedy())
        assert not llm.reset_prefix_cache()
        while engine.has_unfinished_requests():
            results = engine.step()
        assert results[0].num_cached_tokens == 128
        assert llm.reset_prefix_cache()
        assert engine.prefix_cache_stats().num_blocks == 0
        assert generate(llm, [prompt], greedy())[0].num_cached_tokens == 0


def test_a_fault_of_the_device_leaves_no_state(monkeypatch):
    """A step that fails behind its forward: what it was to keep is forgotten, requests start again."""
    prompt = [list(prompt_of(200))]
    with make_llm(settings=PLAIN_STEPS, enable_prefix_caching=False) as llm:
        expected = facts(generate(llm, prompt, greedy(logprobs=1)))
    with make_llm() as llm:
        engine = llm.llm_engine
        real, faults = Caches.copy_slots, iter([True])

        def copy_slots(self: Caches, copies: torch.Tensor) -> None:
            if copies.shape[0] and next(faults, False):
                self.slots[copies[:, 1].long()] = 255
                raise RuntimeError("the device failed")
            real(self, copies)

        monkeypatch.setattr(Caches, "copy_slots", copy_slots)
        engine.add_request("a", prompt[0], greedy(logprobs=1))
        outputs = []
        failed = False
        while engine.has_unfinished_requests():
            try:
                outputs += engine.step()
            except RuntimeError:
                failed = True
                assert engine.prefix_cache_stats().num_snapshots == 0
        assert failed and facts(outputs) == expected
        assert facts(generate(llm, prompt, greedy(logprobs=1))) == expected


def test_what_the_cache_holds_outside_of_known_blocks_is_free():
    """Bytes of blocks and slots that nobody holds and the cache does not know are nobody's."""
    prompt = [list(prompt_of(300))]
    with make_llm() as llm:
        expected = facts(generate(llm, prompt, greedy(logprobs=1)))
        engine = llm.llm_engine
        caches, stats = engine.model_runner._caches, engine.prefix_cache_stats()
        blocks, slots = engine.core.free_blocks(), engine.core.free_slots()
        caches.blocks[np.append(blocks[: len(blocks) - stats.num_blocks], 0)] = 0xFF
        caches.slots[np.append(slots[: len(slots) - stats.num_snapshots], 0)] = 0xFF
        output = generate(llm, prompt, greedy(logprobs=1))
        assert output[0].num_cached_tokens == 256 and facts(output) == expected


def _first_turn(length: int) -> list[int]:
    return [200 + length, *_text_prompt(length - 1)]


def _next_turn(prompt: list[int], answer: list[int]) -> list[int]:
    return prompt + answer + list(prompt_of(9, 2))


@functools.cache
def _plain_turns() -> dict[int, Any]:
    """By length of the first turn, facts of the second one, both of which the plain engine computes."""
    lengths = [*range(110, 129), 240]
    prompts = [_first_turn(length) for length in lengths]
    with make_llm(settings=PLAIN_STEPS, enable_prefix_caching=False) as llm:
        answers = [output.outputs[0].token_ids for output in generate(llm, prompts, greedy(30))]
        turns = [_next_turn(prompt, answer) for prompt, answer in zip(prompts, answers, strict=True)]
        return dict(zip(lengths, facts(generate(llm, turns, greedy(30))), strict=True))


@pytest.mark.parametrize(
    ("name", "step"), [("plain", 6), ("async", 6), ("drafts", 2), ("drafts, async", 1)], ids=str
)
def test_the_next_turn_resumes_behind_the_answer(name, step):
    """Answers pass a border with any number of accepted drafts behind it; its state is kept all the same."""
    lengths = [*range(110, 128, step), 128, 240]
    prompts = [_first_turn(length) for length in lengths]
    params = [greedy(30)] * len(prompts)
    with make_llm(settings=SETTINGS[name], num_prefix_states=80) as llm:
        stats = llm.llm_engine.prefix_cache_stats
        answers = [output.outputs[0].token_ids for output in generate(llm, prompts, params)]
        assert llm.get_stats().num_passed_borders == stats().num_passed >= len({*lengths} - {128})
        turns = [_next_turn(prompt, answer) for prompt, answer in zip(prompts, answers, strict=True)]
        outputs = generate(llm, turns, params)
        assert [output.num_cached_tokens for output in outputs] == [128] * (len(lengths) - 1) + [256]
        if "drafts" in name:
            assert llm.get_stats().num_accepted > 5 * len(lengths)
    assert facts(outputs) == [_plain_turns()[length] for length in lengths]


def test_hashes_begin_with_model_and_weights(tmp_path, monkeypatch):
    salts = []
    real = parts._core_config

    def config_of(*args: Any) -> Any:
        config = real(*args)
        salts.append(config.prefix_salt)
        return config

    monkeypatch.setattr(parts, "_core_config", config_of)
    for name, options in (
        ("v41-tiny", {}),
        ("v41-tiny", {}),
        ("tiny-quant", {}),
        ("v41-tiny", {"arithmetic": "w8a8"}),
    ):
        make_llm(name, **options).close()
    changed = tmp_path / "changed"
    shutil.copytree(MODELS["v41-tiny"], changed)
    os.utime(next(changed.glob("*.safetensors")), (0, 0))
    LLM(str(changed), max_num_seqs=4, max_model_len=256).close()
    assert salts[0] == salts[1] and len(set(salts)) == 4 and min(salts) > 0


def test_salted_prompts_share_among_themselves():
    ids = list(prompt_of(200))
    prompts = [{"prompt_token_ids": ids, "cache_salt": salt} for salt in ("a", "a", "b", "b")]
    prompts += [{"prompt_token_ids": ids}] * 2
    with make_llm() as llm:
        outputs = [generate(llm, [prompt], greedy(logprobs=1))[0] for prompt in prompts]
        assert [output.num_cached_tokens for output in outputs] == [0, 128] * 3
        assert all(output == facts(outputs)[0] for output in facts(outputs))
        llm.reset_prefix_cache()
        outputs = generate(llm, prompts, greedy(logprobs=1))  # forks, too, only of one's own
        assert [output.num_cached_tokens for output in outputs] == [0, 199] * 3


@pytest.mark.parametrize("name", ["plain", "drafts, async"])
def test_a_common_beginning_is_computed_once_in_a_batch(name):
    """The first computes it, the others wait for the state behind it; a row of 250 cuts it in two steps."""
    common = list(prompt_of(300))
    prompts = [common + list(prompt_of(tail, tail)) for tail in (30, 200, 7, 128, 64)] + [common[:200]]
    expected = _computed(prompts, greedy(5, logprobs=1))
    for rows in (4096, 250):
        with make_llm(settings=SETTINGS[name], max_num_batched_tokens=rows) as llm:
            outputs = generate(llm, prompts, greedy(5, logprobs=1))
            assert facts(outputs) == expected
            cached = [output.num_cached_tokens for output in outputs]
            assert cached[:5] == [0, 256, 256, 256, 256] and cached[5] in (0, 128)
