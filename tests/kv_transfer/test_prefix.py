"""Prefixes: what a border needs, loading layer by layer, writing in the background; real layouts."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from deepinfer.kv_transfer.directory_store import DirectoryStore
from deepinfer.kv_transfer.entry import BLOCK, ENCODER, STATE, DamagedEntryError, EntryLayout
from deepinfer.kv_transfer.keys import Identity
from deepinfer.kv_transfer.memory_store import MemoryStore
from deepinfer.kv_transfer.prefix import REPLAYED, PrefixChain, PrefixStore
from deepinfer.kv_transfer.store import KVStore
from deepinfer.models.deepseek_v41.config import DeepseekV41Config
from deepinfer.models.deepseek_v41.spec import model_spec
from deepinfer.runtime.cache_layout import CacheLayout
from tests.checkpoint.configs import RELEASE
from tests.kv_transfer.toys import noise, toy_layout, toy_prefixes
from tests.support.models import load_config

TOKENS = np.arange(50, 50 + 23, dtype=np.int32)  # five blocks and three tokens


@pytest.fixture(params=["memory", "directory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> KVStore:
    return MemoryStore(1 << 20) if request.param == "memory" else DirectoryStore(tmp_path, 1 << 20)


@pytest.fixture
def prefixes(store: KVStore) -> Iterator[PrefixStore]:
    made = toy_prefixes(store)
    yield made
    made.close()


def block_of(index: int) -> np.ndarray:
    return noise("block", index, size=toy_layout().block_bytes)


def slot_of(border: int) -> np.ndarray:
    return noise("slot", border, size=toy_layout().slot_bytes)


def fill(prefixes: PrefixStore, chain: PrefixChain, blocks: range, states: tuple[int, ...]) -> None:
    for index in blocks:
        assert prefixes.put_block(chain, index, block_of(index))
    for border in states:
        assert prefixes.put_state(chain, border, slot_of(border))


def pools(num_blocks: int) -> tuple[np.ndarray, np.ndarray]:
    """Blocks and a slot that hold 238 everywhere."""
    layout = toy_layout()
    return (
        np.full((num_blocks, layout.block_bytes), 238, np.uint8),
        np.full(layout.slot_bytes, 238, np.uint8),
    )


def assert_loaded(kind: str, out: np.ndarray, expected: np.ndarray) -> None:
    """Sections are there, and every byte between them is as it was."""
    is_section = np.zeros(len(out), bool)
    for part in toy_layout().sections(kind):
        is_section[part.offset : part.offset + part.num_bytes] = True
    assert np.array_equal(out[is_section], expected[is_section])
    assert (out[~is_section] == 238).all() and not is_section.all()


def test_find_needs_blocks_and_state(prefixes: PrefixStore) -> None:
    chain = prefixes.chain(TOKENS)
    assert prefixes.find(chain, 5) == 0
    fill(prefixes, chain, range(4), states=(2, 5))
    assert prefixes.find(chain, 9) == 2  # the block before border 5 is missing
    assert prefixes.find(chain, 1) == 0
    fill(prefixes, chain, range(4, 5), states=(4,))
    assert [prefixes.find(chain, limit) for limit in range(7)] == [0, 0, 2, 2, 4, 5, 5]
    assert prefixes.find(chain, 9, num_known=4) == 5 and prefixes.find(chain, 4, num_known=4) == 4
    assert prefixes.find(chain, 4, num_known=4, resumable=2) == 4  # its blocks are known, its state is not
    assert prefixes.find(chain, 4, num_known=4, resumable=4) == 0
    assert prefixes.find(chain, 2, num_known=4, resumable=1) == 2
    prefixes.store.remove(chain.block(1).key)
    assert prefixes.find(chain, 9) == 0  # a gap
    assert prefixes.find(chain, 9, num_known=2) == 5  # which does not matter to who has these blocks


@pytest.mark.parametrize("kind", [STATE, ENCODER])
def test_states_of_the_encoder(prefixes: PrefixStore, kind: str) -> None:
    """Who replays the decoder takes either kind and reads the encoder's part; others need all of it."""
    chain = prefixes.chain(TOKENS)
    for index in range(3):
        prefixes.put_block(chain, index, block_of(index))
    assert prefixes.put_later(chain, 3, {}, slot_of(3), kind)
    prefixes.flush()
    with prefixes.store.get(chain.state(3, kind).key) as entry:
        assert entry.header.num_bytes == (33 + 34 if kind == ENCODER else 33 + 34 + 35 + 36)
        assert entry.header.key.kind == kind and len(entry.header.sections) == (2 if kind == ENCODER else 4)
    assert prefixes.find(chain, 9) == (3 if kind == STATE else 0)
    assert prefixes.find(chain, 9, kinds=REPLAYED) == 3
    blocks, slot = pools(3)
    load = prefixes.load(chain, 3, list(blocks), slot, REPLAYED)
    load.wait(timeout_s=10)
    assert load.layers == (0, 1, 3)  # 3 owns a part of the blocks
    for part in toy_layout().state:
        span = slice(part.offset, part.offset + part.num_bytes)
        expected = slot_of(3)[span] if part.layer_id < 2 else np.full(part.num_bytes, 238)
        assert np.array_equal(slot[span], expected)
    assert_loaded(BLOCK, blocks[2], block_of(2))
    if kind == ENCODER:
        assert prefixes.load(chain, 3, list(blocks), slot) is None
        prefixes.put_state(chain, 3, slot_of(3))  # both are there: the smaller one is read
        before = prefixes.store.stats().bytes_read
        prefixes.load(chain, 3, [], slot, REPLAYED).wait(timeout_s=10)
        read = prefixes.store.stats().bytes_read - before
        with prefixes.store.get(chain.state(3, ENCODER).key) as entry:
            assert read == entry.head.total_bytes


def test_a_shared_beginning_is_shared(prefixes: PrefixStore) -> None:
    fill(prefixes, prefixes.chain(TOKENS), range(5), states=(3, 5))
    other = TOKENS.copy()
    other[14] += 1  # in block 3
    assert prefixes.find(prefixes.chain(other), 9) == 3
    other[0] += 1
    assert prefixes.find(prefixes.chain(other), 9) == 0


@pytest.mark.parametrize("name", ["model", "arithmetic"])
def test_another_engine_finds_nothing(prefixes: PrefixStore, name: str) -> None:
    fill(prefixes, prefixes.chain(TOKENS), range(5), states=(5,))
    other = toy_prefixes(prefixes.store, **{name: "another"})
    assert other.find(other.chain(TOKENS), 9) == 0
    other.close()


def test_identity_has_to_be_of_the_layout(store: KVStore) -> None:
    with pytest.raises(ValueError, match="another layout"):
        toy_prefixes(store, layout="1:abc")


@pytest.mark.parametrize("num_known", [0, 2, 5])
def test_load(prefixes: PrefixStore, num_known: int) -> None:
    chain = prefixes.chain(TOKENS)
    fill(prefixes, chain, range(5), states=(5,))
    blocks, slot = pools(5 - num_known)
    load = prefixes.load(chain, 5, list(blocks), slot)
    assert load.layers == (0, 1, 2, 3)
    load.wait(timeout_s=10)
    for place, out in enumerate(blocks):
        assert_loaded(BLOCK, out, block_of(num_known + place))
    assert_loaded(STATE, slot, slot_of(5))


def test_layers_arrive_in_order(prefixes: PrefixStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the loader is held up in a layer, the ones before are there and the ones behind are not."""
    chain = prefixes.chain(TOKENS)
    fill(prefixes, chain, range(5), states=(5,))
    gates = [threading.Event() for _ in range(4)]
    names: list[str] = []
    real = type(prefixes.store.get(chain.block(0).key)).read_into

    def read_into(self: object, section: int, out: memoryview) -> None:
        name = self.header.sections[section][0]
        assert gates[int(name[0])].wait(10)
        names.append(name)
        real(self, section, out)

    monkeypatch.setattr(type(prefixes.store.get(chain.block(0).key)), "read_into", read_into)
    blocks, slot = pools(5)
    load = prefixes.load(chain, 5, list(blocks), slot)
    for layer in range(4):
        with pytest.raises(TimeoutError):
            load.wait(layer, timeout_s=0.02)
        assert not load.future(3).done()
        gates[layer].set()
        load.wait(layer, timeout_s=10)
        assert_loaded_until(layer, blocks, slot)
    expected = ["0.window", "1.window", *["1.paged"] * 5, "2.window", "3.window", *["3.paged"] * 5]
    assert sorted(names) == sorted(expected) and [name[0] for name in names] == [e[0] for e in expected]


def assert_loaded_until(layer: int, blocks: np.ndarray, slot: np.ndarray) -> None:
    for kind, outs, makes in ((BLOCK, blocks, block_of), (STATE, [slot], lambda _: slot_of(5))):
        for place, out in enumerate(outs):
            for part in toy_layout().sections(kind):
                span = slice(part.offset, part.offset + part.num_bytes)
                expected = makes(place)[span] if part.layer_id <= layer else np.full(part.num_bytes, 238)
                assert np.array_equal(out[span], expected)


def test_nothing_there_after_all(prefixes: PrefixStore) -> None:
    chain = prefixes.chain(TOKENS)
    fill(prefixes, chain, range(3), states=(3,))
    prefixes.store.remove(chain.block(0).key)
    blocks, slot = pools(3)
    assert prefixes.load(chain, 3, list(blocks), slot) is None
    assert (blocks == 238).all() and (slot == 238).all()


def test_damage_in_a_late_layer(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Earlier layers arrive, that one and all behind it fail; the next search does not find it any more."""
    prefixes = toy_prefixes(DirectoryStore(tmp_path))
    chain = prefixes.chain(TOKENS)
    fill(prefixes, chain, range(5), states=(2, 5))
    path = Path(prefixes.store._index.path(str(chain.block(3).key)))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1  # the last byte of the last section, which layer 3 reads
    path.write_bytes(data)
    blocks, slot = pools(5)
    load = prefixes.load(chain, 5, list(blocks), slot)
    load.wait(2, timeout_s=10)
    with pytest.raises(DamagedEntryError, match=r"3\.paged"):
        load.wait(timeout_s=10)
    assert "not used" in caplog.text and prefixes.find(chain, 9) == 2
    prefixes.close()


def test_cancel(prefixes: PrefixStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Afterwards nothing is written any more, whatever had been read."""
    chain = prefixes.chain(TOKENS)
    fill(prefixes, chain, range(5), states=(5,))
    kind = type(prefixes.store.get(chain.block(0).key))
    real, started, go_on = kind.read_into, threading.Event(), threading.Event()

    def read_into(self: object, section: int, out: memoryview) -> None:
        started.set()
        assert go_on.wait(10)
        real(self, section, out)

    monkeypatch.setattr(kind, "read_into", read_into)
    blocks, slot = pools(5)
    load = prefixes.load(chain, 5, list(blocks), slot)
    assert started.wait(10)
    threading.Timer(0.05, go_on.set).start()
    load.cancel()
    copies = blocks.copy(), slot.copy()
    with pytest.raises(DamagedEntryError, match="cancelled"):
        load.wait()
    assert np.array_equal(blocks, copies[0]) and np.array_equal(slot, copies[1]) and (blocks == 238).all()


def test_put_later(prefixes: PrefixStore) -> None:
    """The bytes are those of the call; the pools may change at once."""
    chain = prefixes.chain(TOKENS)
    blocks, slot = [block_of(index).copy() for index in range(3)], slot_of(3).copy()
    assert prefixes.put_later(chain, 3, dict(enumerate(blocks)), slot)
    for array in (*blocks, slot):
        array[:] = 0
    assert prefixes.put_later(chain, 5, {3: block_of(3), 4: block_of(4)}, None)
    prefixes.flush()
    assert prefixes.find(chain, 9) == 3
    assert prefixes.store.longest_prefix([chain.block(index).key for index in range(5)]) == 5
    outs, out = pools(3)
    prefixes.load(chain, 3, list(outs), out).wait(timeout_s=10)
    assert_loaded(BLOCK, outs[2], block_of(2))
    assert_loaded(STATE, out, slot_of(3))


def test_put_later_is_bounded(store: KVStore) -> None:
    prefixes = toy_prefixes(store)
    prefixes._max_pending_bytes = 600
    gate = threading.Event()
    prefixes._writer.submit(gate.wait, 10)
    chain = prefixes.chain(TOKENS)
    taken = [prefixes.put_later(chain, index + 1, {index: block_of(index)}, None) for index in range(5)]
    assert taken == [True, True, True, True, False] and prefixes.num_dropped == 1
    gate.set()
    prefixes.flush()
    assert prefixes.put_later(chain, 5, {4: block_of(4)}, None)
    prefixes.close()
    prefixes.close()
    assert store.contains(chain.block(4).key)


def test_a_store_that_raises(caplog: pytest.LogCaptureFixture) -> None:
    """Somebody else's store may be faulty: the fault is logged, and the next entry is tried."""

    class Faulty(MemoryStore):
        def put(self, *_: object, **__: object) -> bool:
            raise RuntimeError("broken")

    prefixes = toy_prefixes(Faulty(1000))
    assert prefixes.put_later(prefixes.chain(TOKENS), 1, {0: block_of(0)}, None)
    prefixes.flush()
    assert "broken" in caplog.text and prefixes._pending_bytes == 0
    prefixes.close()


# ---- layouts of real models


def layout_of(name: str) -> CacheLayout:
    config = DeepseekV41Config.from_dict(RELEASE) if name == "release" else load_config(name)
    return CacheLayout.build(model_spec(config), release=True, block_size=128, max_backtracking=6)


@pytest.mark.parametrize(
    ("name", "block", "state", "encoder"),
    [("release", 113_920, 43 * 70_752, 1_415_040), ("v41-tiny", 68_352, 11 * 70_752, 283_008)],
)
def test_sections_of_real_models(name: str, block: int, state: int, encoder: int) -> None:
    pool = layout_of(name)
    layout = EntryLayout.of(pool)
    assert sum(s.num_bytes for s in layout.block) == block
    assert sum(s.num_bytes for s in layout.state) == state
    assert sum(s.num_bytes for s in layout.encoder) == encoder == pool.stored_slot_bytes
    # By the formula: a ring of window + max_backtracking records for each layer in front of the decoder.
    config = DeepseekV41Config.from_dict(RELEASE) if name == "release" else load_config(name)
    spec = model_spec(config)
    assert encoder == spec.first_decoder_layer * (config.sliding_window + 6) * (512 + 512 // 32)
    assert layout.encoder == layout.state[: spec.first_decoder_layer]
    backbone = EntryLayout.of(pool, state_layers=range(spec.num_layers))
    assert backbone.encoder == layout.encoder and len(backbone.state) == spec.num_layers
    for each in (layout, backbone):
        for sections, size in ((each.block, each.block_bytes), (each.state, each.slot_bytes)):
            ends = [s.offset + s.num_bytes for s in sections]
            assert all(end <= s.offset for end, s in zip(ends, sections[1:])) and ends[-1] <= size
            assert [s.layer_id for s in sections] == sorted(s.layer_id for s in sections)
    assert layout.fingerprint() != backbone.fingerprint() == replace(backbone).fingerprint()


def test_a_real_layout_through_a_directory(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    layout = EntryLayout.of(layout_of("v41-tiny"))
    identity = Identity("tiny", "float32", layout.fingerprint(), 128)
    prefixes = PrefixStore(DirectoryStore(tmp_path), identity, layout)
    chain = prefixes.chain(np.arange(400, dtype=np.int32))
    blocks = noise("blocks", size=3 * layout.block_bytes).reshape(3, -1)
    slot = noise("slot", size=layout.slot_bytes)
    assert prefixes.put_later(chain, 3, dict(enumerate(blocks)), slot)
    prefixes.flush()
    outs, out = np.zeros_like(blocks), np.zeros_like(slot)
    prefixes.load(chain, 3, list(outs), out).wait(timeout_s=10)
    for sections, found, expected in ((layout.block, outs, blocks), (layout.state, [out], [slot])):
        for part in sections:
            span = slice(part.offset, part.offset + part.num_bytes)
            for a, b in zip(found, expected):
                assert np.array_equal(a[span], b[span])
    assert not caplog.records
    prefixes.close()
