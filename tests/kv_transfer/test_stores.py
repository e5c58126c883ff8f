"""What every store promises, and the limit of each by a model of it written down plainly."""

from __future__ import annotations

import random
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from deepinfer.kv_transfer.directory_store import DirectoryStore
from deepinfer.kv_transfer.entry import EntryKey
from deepinfer.kv_transfer.memory_store import MemoryStore
from deepinfer.kv_transfer.store import KVStore
from tests.kv_transfer.toys import contents, entry

Make = Callable[..., KVStore]


@pytest.fixture(params=["memory", "directory"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Make:
    """Makes a store with a limit; a second call makes another one over the same place, if there is one."""
    if request.param == "memory":
        return lambda limit=1 << 20: MemoryStore(limit)
    return lambda limit=1 << 20: DirectoryStore(tmp_path / "store", limit)


def cost(number: int, size: int = 100, store: KVStore | None = None) -> int:
    """Bytes that an entry counts for in a store."""
    header, sections = entry(number, size)
    if isinstance(store, MemoryStore):
        return size + len(header.token_ids)
    return size + len(header.encode([bytes(32)] * len(sections)))


@pytest.mark.parametrize("size", [3, 100, 70_000])
def test_round_trip(make: Make, size: int) -> None:
    store = make()
    header, sections = entry(1, size)
    assert store.get(header.key, header) is None and not store.contains(header.key)
    assert store.put(header, sections)
    for expected in (header, None):
        found = store.get(header.key, expected)
        assert found is not None and found.header == header
        assert contents(found) == sections
    stats = store.stats()
    assert (stats.puts, stats.hits, stats.misses, stats.num_entries) == (1, 2, 1, 1)
    assert stats.num_bytes == cost(1, size, store)


def test_kinds_are_apart(make: Make) -> None:
    store = make()
    block, state = entry(1), entry(1, 200, kind="state")
    store.put(*block)
    assert not store.contains(state[0].key)
    store.put(*state)
    for header, sections in (block, state):
        assert contents(store.get(header.key, header)) == sections


def test_sections_in_any_order_and_buffers_of_any_kind(make: Make) -> None:
    store = make()
    header, sections = entry(1)
    mutable = [bytearray(data) for data in sections]
    store.put(header, [memoryview(data) for data in mutable])
    for data in mutable:
        data[:] = bytes(len(data))  # they are the caller's again
    found = store.get(header.key)
    assert found.read(2) == sections[2] and found.read(0) == sections[0] and found.read(2) == sections[2]
    with pytest.raises(ValueError, match="buffer"):
        found.read_into(0, memoryview(bytearray(5)))
    found.close()
    found.close()


def test_wrong_sizes_are_the_callers_mistake(make: Make) -> None:
    header, sections = entry(1)
    for bad in (sections[:-1], [*sections, b""], [sections[0] + b"x", *sections[1:]]):
        with pytest.raises(ValueError, match="sections of"):
            make().put(header, bad)


def test_an_entry_stays_unless_it_is_replaced(make: Make) -> None:
    store = make()
    header, sections = entry(1)
    others = [bytes(len(data)) for data in sections]
    assert store.put(header, sections) and store.put(header, others)
    assert contents(store.get(header.key)) == sections
    assert store.put(header, others, replace=True)
    assert contents(store.get(header.key)) == others
    assert store.stats().num_entries == 1 and store.stats().num_bytes == cost(1, store=store)


def test_other_tokens_under_the_same_key_are_a_miss(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    """As if two prefixes had the same digest; and all else that a header says."""
    header, sections = entry(1)
    changes = {
        "token_ids": entry(2)[0].token_ids,
        "parent": bytes(32),
        "identity": bytes(32),
        "num_tokens": 12,
        "sections": (("a", 33), ("nothing", 0), ("c", 67)),
    }
    for name, value in changes.items():
        store = make()
        store.put(header, sections)
        caplog.clear()
        assert store.get(header.key, replace(header, **{name: value})) is None
        assert f"{name} differs" in caplog.text
        assert not store.contains(header.key) and store.stats().damaged == 1


def test_longest_prefix(make: Make) -> None:
    store = make()
    keys = [entry(number)[0].key for number in range(6)]
    assert store.longest_prefix([]) == 0
    for number in (0, 1, 2, 4):
        store.put(*entry(number))
    assert store.longest_prefix(keys) == 3
    assert store.longest_prefix(keys[:2]) == 2 and store.longest_prefix(keys[3:]) == 0


def test_remove(make: Make) -> None:
    store = make()
    header, sections = entry(1)
    assert not store.remove(header.key)
    store.put(header, sections)
    assert store.remove(header.key) and not store.remove(header.key)
    assert store.get(header.key) is None and store.stats().num_bytes == 0


def test_closed_store_misses(make: Make) -> None:
    with make() as store:
        store.put(*entry(1))
    store.close()
    assert not store.put(*entry(2))
    assert store.get(entry(1)[0].key) is None and not store.contains(entry(1)[0].key)


def test_a_reader_keeps_what_is_evicted(make: Make) -> None:
    store = make(3 * 1000)
    header, sections = entry(1, 900)
    store.put(header, sections)
    found = store.get(header.key)
    for number in range(2, 8):
        store.put(*entry(number, 900))
    assert not store.contains(header.key)
    assert contents(found) == sections


def test_too_large_for_the_limit(make: Make) -> None:
    store = make(2000)
    store.put(*entry(1))
    assert not store.put(*entry(2, 4000))
    assert store.contains(entry(1)[0].key) and store.stats().evicted == 0


@pytest.mark.parametrize("limit", [0, -5])
def test_bad_limits(make: Make, limit: int) -> None:
    with pytest.raises(ValueError, match="max_bytes"):
        make(limit)


@pytest.mark.parametrize("trace", range(4))
def test_lru_against_a_model(make: Make, trace: int, seed: int) -> None:
    """Random puts, gets and removals: the same entries are there, and the limit holds, after every step."""
    rng = random.Random(seed)
    sizes = [rng.randrange(3, 900) for _ in range(24)]
    store = make(limit := 3000 + 800 * trace)
    held: OrderedDict[int, int] = OrderedDict()  # least recently used first
    evicted = 0
    for _ in range(400):
        number = rng.randrange(len(sizes))
        header, sections = entry(number, sizes[number])
        action = rng.choice(("put", "put", "get", "get", "replace", "remove", "contains"))
        if action in ("put", "replace"):
            if action == "replace" or number not in held:
                held.pop(number, None)
                need = cost(number, sizes[number], store)
                while sum(held.values()) + need > limit:
                    held.popitem(last=False)
                    evicted += 1
                held[number] = need
            held.move_to_end(number)
            assert store.put(header, sections, replace=action == "replace")
        elif action == "get":
            found = store.get(header.key, header)
            assert (found is not None) == (number in held)
            if found is not None:
                held.move_to_end(number)
                assert contents(found) == sections
        elif action == "remove":
            assert store.remove(header.key) == (held.pop(number, None) is not None)
        assert store.contains(header.key) == (number in held)
        stats = store.stats()
        assert stats.num_bytes == sum(held.values()) <= limit and stats.num_entries == len(held)
        assert stats.evicted == evicted
    assert evicted > 20
    assert [n for n in range(len(sizes)) if store.contains(entry(n)[0].key)] == sorted(held)


def test_threads(make: Make) -> None:
    """Eight threads over few keys and a small limit: whatever is found is what was put."""
    store = make(6000)
    wrong: list[str] = []

    def work(number: int) -> None:
        rng = random.Random(number)
        for _ in range(60):
            header, sections = entry(rng.randrange(12), 700)
            if rng.random() < 0.5:
                store.put(header, sections, replace=rng.random() < 0.3)
            elif (found := store.get(header.key, header)) is not None and contents(found) != sections:
                wrong.append(str(header.key))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and store.stats().damaged == 0
    assert store.stats().num_bytes <= 6000 and store.stats().hits > 0


def test_keys_are_checked() -> None:
    with pytest.raises(ValueError, match="kind"):
        EntryKey("blocks", bytes(32))
    with pytest.raises(ValueError, match="32 bytes"):
        EntryKey("block", bytes(31))
