"""The KV store in the engine: what was computed once is found again, also by another engine or process.

The cache of an engine is forgotten by making a new one over the same store; whatever resumes there comes from
the store. Counters tell that it did, and results are those of an engine without a store, bit by bit.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from deepinfer.entrypoints.llm import LLM
from deepinfer.kv_transfer.directory_store import DirectoryStore
from deepinfer.kv_transfer.entry import DamagedEntryError, EntryHead, EntryHeader, EntryKey, digests_of
from deepinfer.kv_transfer.memory_store import MemoryStore
from deepinfer.kv_transfer.store import Buffer, KVStore, StoredEntry, StoreStats
from deepinfer.sampling_params import SamplingParams
from deepinfer.settings import Settings
from tests.support.engines import PLAIN_STEPS, assert_idle, facts, generate, greedy, make_llm, prompt_of
from tests.support.paths import V41_TINY
from tests.support.process import run

BLOCK = 128


@pytest.fixture
def store() -> Iterator[KVStore]:
    with MemoryStore(1 << 30) as made:
        yield made


def answers(prompts: list[list[int]], params: SamplingParams, **options: object) -> list[object]:
    """Facts of a plain engine without a store or a prefix cache."""
    with make_llm(enable_prefix_caching=False, **{**options, "settings": PLAIN_STEPS}) as llm:
        return facts(generate(llm, prompts, params))


def cached(outputs: list) -> list[int]:
    return [output.num_cached_tokens for output in outputs]


def prompts_of(*lengths: int) -> list[list[int]]:
    return [list(prompt_of(length, seed)) for seed, length in enumerate(lengths)]


@pytest.mark.parametrize(("kind", "use_async", "num_drafts"), [("directory", True, 5), ("memory", False, 0)])
def test_a_new_engine_resumes(tmp_path: Path, kind: str, use_async: bool, num_drafts: int) -> None:
    """Lengths around the borders; the last token is always computed."""
    store = DirectoryStore(tmp_path) if kind == "directory" else MemoryStore(1 << 30)
    prompts = prompts_of(127, 128, 129, 255, 256, 257, 300, 700)
    params = SamplingParams(temperature=0.8, max_tokens=8, seed=5, logprobs=1, ignore_eos=True)
    settings = Settings(use_async_scheduling=use_async, num_draft_tokens=num_drafts)
    expected = answers(prompts, params)
    with make_llm(settings=settings, kv_store=store) as llm:
        outputs = generate(llm, prompts, params)
        assert facts(outputs) == expected and set(cached(outputs)) == {0}
        exchange = llm.llm_engine.kv_store
        exchange.flush()
        # In front of the last token 6; where the answers to 127 and 255 pass, and where 128 and 256 end, 4.
        assert exchange.stats.num_kept == 6 + 4 and exchange.stats.num_loaded == 0
    with make_llm(settings=settings, kv_store=store) as llm:
        outputs = generate(llm, prompts, params)
        assert facts(outputs) == expected
        borders = [(len(prompt) - 1) // BLOCK * BLOCK for prompt in prompts]
        assert cached(outputs) == borders == [0, 0, 128, 128, 128, 256, 256, 640]
        exchange = llm.llm_engine.kv_store
        assert exchange.stats.num_loaded == 6 and exchange.stats.num_loaded_tokens == sum(borders)
        assert exchange.stats.num_failed == 0 and exchange.stats.num_kept == 0
        assert llm.llm_engine.stats.num_prefill_tokens == sum(map(len, prompts)) - sum(borders)


def test_the_cache_comes_first(store: KVStore) -> None:
    """What the engine's own cache holds is not loaded again."""
    prompts = prompts_of(300)
    with make_llm(kv_store=store) as llm:
        first = facts(generate(llm, prompts, greedy()))
        assert facts(generate(llm, prompts, greedy())) == first
        assert llm.llm_engine.kv_store.stats.num_lookups == 1
        assert llm.llm_engine.kv_store.stats.num_loaded == 0


def test_shared_beginnings(store: KVStore) -> None:
    """Prompts that part behind a stored border resume there; blocks before it are loaded once."""
    base = list(prompt_of(512))
    prompts = [base + list(prompt_of(40, seed)) for seed in range(1, 5)]
    expected = answers(prompts, greedy())
    with make_llm(kv_store=store) as llm:
        generate(llm, [[*base, 20]], greedy())
    with make_llm(kv_store=store) as llm:
        outputs = generate(llm, prompts, greedy())
        assert facts(outputs) == expected and cached(outputs) == [512] * 4
        assert llm.llm_engine.kv_store.stats.num_loaded == 1


def test_a_later_border_over_known_blocks(store: KVStore) -> None:
    """The cache knows the first blocks; the store adds those behind them, and the state."""
    base = list(prompt_of(700))
    expected = answers([base], greedy())
    with make_llm(kv_store=store) as llm:
        generate(llm, [base], greedy())
    with make_llm(kv_store=store) as llm:
        generate(llm, [base[:300]], greedy())
        output = generate(llm, [base], greedy())
        assert facts(output) == expected and cached(output) == [640]
        assert llm.llm_engine.kv_store.stats.num_loaded == 1


def test_samples_of_one_prompt(store: KVStore) -> None:
    prompts = prompts_of(300, 300)
    params = SamplingParams(temperature=1.0, max_tokens=6, n=4, seed=3, ignore_eos=True)
    expected = answers(prompts, params)
    for loaded in (0, 2):
        with make_llm(kv_store=store) as llm:
            assert facts(generate(llm, prompts, params)) == expected
            assert llm.llm_engine.kv_store.stats.num_loaded == loaded


def test_small_pools(store: KVStore) -> None:
    """More prompts than fit at once, with preemptions: nothing is lost, nothing changes."""
    prompts = prompts_of(*[200 + 53 * number for number in range(7)])
    options = {"num_blocks": 14, "max_num_seqs": 4, "max_num_batched_tokens": 256}
    expected = answers(prompts, greedy(20), **options)
    for _ in range(2):
        with make_llm(kv_store=store, **options) as llm:
            assert facts(generate(llm, prompts, greedy(20))) == expected
            stats = llm.llm_engine.kv_store.stats
    assert stats.num_loaded >= 6


def test_without_room_for_states(store: KVStore) -> None:
    """Slots for what runs and none beyond: a store may or may not help, results are the same."""
    prompts = prompts_of(300, 400, 500)
    options = {"num_prefix_states": 0, "max_num_seqs": 2}
    expected = answers(prompts, greedy(), max_num_seqs=2)
    for _ in range(2):
        with make_llm(kv_store=store, **options) as llm:
            assert facts(generate(llm, prompts, greedy())) == expected


def test_aborts(store: KVStore) -> None:
    prompts = prompts_of(300, 400)
    for _ in range(2):
        with make_llm(kv_store=store) as llm:
            engine = llm.llm_engine
            for number, prompt in enumerate(prompts):
                engine.add_request(str(number), prompt, greedy(20))
            engine.step()
            engine.abort_request("0")
            while engine.has_unfinished_requests():
                engine.step()
            engine.settle()
            assert_idle(llm)


def test_prompts_that_are_scored_are_computed(store: KVStore) -> None:
    prompts = prompts_of(300)
    params = greedy(prompt_logprobs=2)
    expected = answers(prompts, params)
    for _ in range(2):
        with make_llm(kv_store=store) as llm:
            outputs = generate(llm, prompts, params)
            assert facts(outputs) == expected and cached(outputs) == [0]
            assert llm.llm_engine.kv_store.stats.num_lookups == 0


def test_reset_leaves_the_store_behind(store: KVStore) -> None:
    """Afterwards the engine finds nothing of before, and others find nothing that it adds."""
    prompts = prompts_of(300)
    with make_llm(kv_store=store) as llm:
        first = facts(generate(llm, prompts, greedy()))
        llm.llm_engine.kv_store.flush()
        assert llm.reset_prefix_cache()
        outputs = generate(llm, prompts, greedy())
        assert facts(outputs) == first and cached(outputs) == [0]
        other = prompts_of(300, 400)[1:]
        generate(llm, other, greedy())
    with make_llm(kv_store=store) as llm:
        assert cached(generate(llm, prompts + other, greedy())) == [256, 0]


# ---- other engines


def entries(store: KVStore) -> int:
    return store.stats().num_entries


def test_other_arithmetic_is_a_miss(store: KVStore) -> None:
    prompts = prompts_of(300)
    with make_llm(kv_store=store) as llm:
        generate(llm, prompts, greedy())
    before = entries(store)
    with make_llm(kv_store=store, arithmetic="w8a8") as llm:
        assert cached(generate(llm, prompts, greedy())) == [0]
    assert entries(store) > before


def test_other_weights_are_a_miss(tmp_path: Path) -> None:
    """The same configuration and shapes; one byte of one tensor differs."""
    changed = tmp_path / "changed"
    shutil.copytree(V41_TINY, changed)
    shard = changed / "model-00002-of-00002.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    store = DirectoryStore(tmp_path / "store")
    prompt = prompts_of(300)
    with make_llm(kv_store=store) as llm:
        generate(llm, prompt, greedy())
    with LLM(str(changed), max_num_seqs=4, max_model_len=1024, kv_store=store) as llm:
        assert cached(llm.generate(prompt, greedy(), use_tqdm=False)) == [0]
        assert cached(llm.generate(prompt, greedy(), use_tqdm=False)) == [256]


def test_drafter_rings_are_named(store: KVStore) -> None:
    """An engine without drafts does not fill them, so one with drafts does not take its states."""
    prompts = prompts_of(300)
    expected = answers(prompts, greedy())
    for drafts, hit in ((0, 0), (5, 0), (0, 256)):
        with make_llm(kv_store=store, settings=Settings(num_draft_tokens=drafts)) as llm:
            outputs = generate(llm, prompts, greedy())
            assert facts(outputs) == expected and cached(outputs) == [hit]


# ---- the directory

PROGRAM = """
import json, sys
from deepinfer import LLM, SamplingParams
prompt = json.loads(sys.argv[1])
store = {"kv_store": sys.argv[2], "kv_store_bytes": 100_000_000}
with LLM("examples/v41-tiny", max_num_seqs=4, max_model_len=1024, **store) as llm:
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    output = llm.generate([prompt], params, use_tqdm=False)[0]
    print(json.dumps([output.num_cached_tokens, output.outputs[0].token_ids]))
"""


def test_a_fresh_process(tmp_path: Path) -> None:
    """The second process finds what the first has left."""
    prompt = list(prompt_of(400))
    tokens = answers([prompt], greedy(6))[0][3][0][1]
    for hit in (0, 384):
        result = run([sys.executable, "-c", PROGRAM, json.dumps(prompt), str(tmp_path)])
        assert result.returncode == 0, result.stderr
        assert json.loads(result.stdout.splitlines()[-1]) == [hit, list(tokens)]


@pytest.mark.parametrize("place", [-1, 0.5, 20])
def test_damaged_entries_are_computed(tmp_path: Path, place: float, caplog: pytest.LogCaptureFixture) -> None:
    """One bit of every file is changed; everything is a miss, and later engines find good entries again."""
    prompts = prompts_of(300, 700)
    expected = answers(prompts, greedy())
    with make_llm(kv_store=DirectoryStore(tmp_path)) as llm:
        generate(llm, prompts, greedy())
    for path in [path for path in tmp_path.rglob("*") if path.is_file()]:
        data = bytearray(path.read_bytes())
        at = int(place * len(data)) if isinstance(place, float) else place
        data[at] ^= 16
        path.write_bytes(data)
    with make_llm(kv_store=DirectoryStore(tmp_path)) as llm:
        outputs = generate(llm, prompts, greedy())
        assert facts(outputs) == expected and cached(outputs) == [0, 0]
        assert llm.llm_engine.kv_store.stats.num_failed == 2 and "not used" in caplog.text
    with make_llm(kv_store=DirectoryStore(tmp_path)) as llm:  # which may meet what was not looked at
        assert facts(generate(llm, prompts, greedy())) == expected


def test_a_store_that_fails(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    prompts = prompts_of(300)
    expected = answers(prompts, greedy())
    with make_llm(kv_store=tmp_path / "file" / "below") as llm:
        assert facts(generate(llm, prompts, greedy())) == expected
    assert "cannot" in caplog.text


# ---- a store of somebody else


class Shelf(KVStore):
    """What the interface asks for and nothing more: bytes in a dict."""

    def __init__(self) -> None:
        self.held: dict[EntryKey, tuple[EntryHeader, list[bytearray], tuple[bytes, ...]]] = {}
        self.is_closed = False

    def put(self, header: EntryHeader, sections: Sequence[Buffer], *, replace: bool = False) -> bool:
        if replace or header.key not in self.held:
            self.held[header.key] = header, [bytearray(data) for data in sections], digests_of(sections)
        return True

    def get(self, key: EntryKey, expected: EntryHeader | None = None) -> StoredEntry | None:
        held = self.held.get(key)
        return None if held is None or expected not in (None, held[0]) else Lent(self, *held)

    def contains(self, key: EntryKey) -> bool:
        return key in self.held

    def remove(self, key: EntryKey) -> bool:
        return self.held.pop(key, None) is not None

    def stats(self) -> StoreStats:
        return StoreStats(num_entries=len(self.held))

    def close(self) -> None:
        self.is_closed = True


class Lent(StoredEntry):
    def __init__(
        self, shelf: Shelf, header: EntryHeader, sections: list[bytearray], digests: tuple[bytes, ...]
    ) -> None:
        self.head = EntryHead(header, digests, 0)
        self._shelf, self._sections = shelf, sections

    def _read(self, section: int, out: memoryview) -> None:
        out[:] = self._sections[section]

    def _give_up(self, error: DamagedEntryError) -> None:
        self._shelf.remove(self.header.key)

    def close(self) -> None:
        pass


def test_another_store_plugs_in() -> None:
    """It serves like those that come with the engine, stays open, and its wrong bytes are noticed for it."""
    prompts = prompts_of(300)
    expected = answers(prompts, greedy())
    shelf = Shelf()
    for hit in (0, 256):
        with make_llm(kv_store=shelf) as llm:
            outputs = generate(llm, prompts, greedy())
            assert facts(outputs) == expected and cached(outputs) == [hit]
        assert not shelf.is_closed and len(shelf.held) == 3
    for _, sections, _ in shelf.held.values():
        sections[-1][-1] ^= 1
    with make_llm(kv_store=shelf) as llm:
        outputs = generate(llm, prompts, greedy())
        assert facts(outputs) == expected and cached(outputs) == [0]
        assert llm.llm_engine.kv_store.stats.num_failed == 1


def test_arguments(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="prefix cache"):
        make_llm(kv_store=tmp_path, enable_prefix_caching=False)
    for nothing in (5, ""):
        with pytest.raises(ValueError, match="KVStore or a directory"):
            make_llm(kv_store=nothing)
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="not a directory"):
        make_llm(kv_store=tmp_path / "file")
    with pytest.raises(ValueError, match="kv_store_bytes=0"):
        make_llm(kv_store=tmp_path, kv_store_bytes=0)
    with make_llm() as llm:
        assert llm.llm_engine.kv_store is None
