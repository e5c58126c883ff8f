"""The KV store under bounded replay: states are the encoder's rings, and serve engines of any setting."""

from __future__ import annotations

from collections import Counter

import pytest

from deepinfer.engine.engine_type import EngineType
from deepinfer.entrypoints.llm import LLM
from deepinfer.kv_transfer.entry import BLOCK, ENCODER, STATE
from deepinfer.kv_transfer.memory_store import MemoryStore
from deepinfer.sampling_params import SamplingParams
from deepinfer.settings import Settings
from tests.support.engines import facts, generate, greedy, make_cold_llm, make_llm, prompt_of
from tests.support.roles import engine_pair, run_pair

KEEP = 140
BYTES = {BLOCK: 68_352, ENCODER: 283_008, STATE: 11 * 70_752}  # of an entry of v41-tiny with its drafter


def settings_of(mode: str, keep: int = KEEP) -> Settings:
    return Settings(replay_mode=mode, replay_keep_tokens=keep)


def kinds_of(store: MemoryStore) -> Counter[str]:
    """How many entries of each kind a store holds; each has the bytes of its kind."""
    for key, entry in store._entries.items():
        assert entry.header.num_bytes == BYTES[key.kind], f"{key}"
    return Counter(key.kind for key in store._entries)


def run(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> tuple[list, list[int]]:
    """Facts, and what was found. Pools hold NaN everywhere before, so what is not loaded must not be read."""
    llm.llm_engine._pools._caches.slots.fill_(0xFF)
    outputs = generate(llm, prompts, params)
    llm.llm_engine.kv_store.flush()
    return facts(outputs), [output.num_cached_tokens for output in outputs]


def cold(prompts: list[list[int]], params: SamplingParams, settings: Settings) -> list:
    with make_cold_llm(settings=settings) as llm:
        return facts(generate(llm, prompts, params))


@pytest.mark.parametrize("mode", ["mask", "compact"])
def test_a_hit_ends_in_front_of_the_windows(mode: str) -> None:
    """Lengths around K and around lo = n - K at a border: equal to cold under the same mode."""
    lengths = (139, 140, 141, 267, 268, 269, 395, 396, 397, 700)
    prompts = [list(prompt_of(length, length)) for length in lengths]
    params = SamplingParams(temperature=0.8, max_tokens=8, seed=5, logprobs=1, ignore_eos=True)
    expected = cold(prompts, params, settings_of(mode))
    store = MemoryStore(1 << 30)
    with make_llm(kv_store=store, settings=settings_of(mode)) as llm:
        results, hits = run(llm, prompts, params)
        assert results == expected and set(hits) == {0}
    # Two prompts are not cut and have whole states; the others have one at the last border, and one at the
    # last border in front of lo.
    kinds = kinds_of(store)
    assert kinds[STATE] == 2 and kinds[ENCODER] == 8 + 6
    with make_llm(kv_store=store, settings=settings_of(mode)) as llm:
        results, hits = run(llm, prompts, params)
        assert results == expected
        assert hits == [128, 128, 0, 0, 128, 128, 128, 256, 256, 512]
        exchange = llm.llm_engine.kv_store
        assert exchange.stats.num_loaded == 8 and exchange.stats.num_failed == 0
        assert llm.llm_engine.stats.num_prefill_tokens == sum(lengths) - sum(hits)


def test_what_an_exact_engine_has_left_is_enough() -> None:
    """A whole state serves a sequence that replays; the encoder's part alone is a miss for an exact one."""
    base = list(prompt_of(700))
    longer = base + list(prompt_of(100, 1))
    store = MemoryStore(1 << 30)
    with make_llm(kv_store=store) as llm:
        run(llm, [base], greedy())
    assert kinds_of(store) == {BLOCK: 5, STATE: 1}
    with make_llm(kv_store=store, settings=settings_of("compact")) as llm:
        results, hits = run(llm, [longer], greedy(8, logprobs=1))
        assert hits == [640] and results == cold([longer], greedy(8, logprobs=1), settings_of("compact"))
    assert kinds_of(store) == {BLOCK: 6, STATE: 1, ENCODER: 1}
    exact = cold([longer], greedy(8, logprobs=1), Settings())
    for hit in (640, 768):
        with make_llm(kv_store=store) as llm:
            results, hits = run(llm, [longer], greedy(8, logprobs=1))
            assert hits == [hit] and results == exact
    assert kinds_of(store) == {BLOCK: 6, STATE: 2, ENCODER: 1}


def test_other_settings_share_entries() -> None:
    """Encoders know nothing of K and the mode, so one engine's states are another one's."""
    base = list(prompt_of(500))
    longer = base + list(prompt_of(300, 1))
    store = MemoryStore(1 << 30)
    with make_llm(kv_store=store, settings=settings_of("compact")) as llm:
        run(llm, [base], greedy())
    assert kinds_of(store) == {BLOCK: 3, ENCODER: 2}
    for settings in (settings_of("mask"), settings_of("compact", 256), settings_of("compact", 500)):
        expected = cold([longer], greedy(8, logprobs=1), settings)
        with make_llm(kv_store=store, settings=settings) as llm:
            results, hits = run(llm, [longer], greedy(8, logprobs=1))
            assert results == expected
            assert hits == [256 if settings.replay_keep_tokens == 500 else 384]


def test_sequences_are_handed_from_mask_to_compact() -> None:
    cases = {str(n): (list(prompt_of(n)), greedy(12, logprobs=1)) for n in (100, 141, 300, 513)}
    with make_cold_llm(settings=settings_of("compact")) as llm:
        expected = facts(generate(llm, [p for p, _ in cases.values()], [q for _, q in cases.values()]))
    with engine_pair(settings=settings_of("mask"), other=settings_of("compact")) as (prompt, completion):
        results = run_pair(prompt, completion, cases)
        assert facts([results[name] for name in cases]) == expected
        assert completion.hand_off_stats.num_sequences == len(cases)
        assert prompt.engine_type is EngineType.PROMPT and completion.stats.num_prefill_tokens == 0
