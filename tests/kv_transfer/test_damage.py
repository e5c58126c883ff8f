"""Files that are not what was written: each is a miss with a warning and goes; none gives wrong bytes."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import numpy as np
import pytest

from deepinfer.kv_transfer import directory_store, entry
from deepinfer.kv_transfer.directory_store import DirectoryStore
from deepinfer.kv_transfer.entry import DamagedEntryError, EntryHeader
from tests.kv_transfer.toys import contents
from tests.kv_transfer.toys import entry as toy_entry

HEADER, SECTIONS = toy_entry(1, 60)
HEAD_BYTES = len(HEADER.encode([bytes(32)] * 3))
NUM_JSON = struct.unpack_from("<I", HEADER.encode([bytes(32)] * 3), 12)[0]
# Where each part of the file begins.
PARTS = {
    "magic": 0,
    "version": 8,
    "sizes": 12,
    "json": 24,
    "tokens": 24 + NUM_JSON,
    "checksums": 24 + NUM_JSON + 16,
    "checksum of the head": HEAD_BYTES - 32,
    "section a": HEAD_BYTES,
    "section b": HEAD_BYTES + 20,
    "end": HEAD_BYTES + 60,
}


@pytest.fixture
def store(tmp_path: Path) -> DirectoryStore:
    return DirectoryStore(tmp_path)


@pytest.fixture
def path(store: DirectoryStore, tmp_path: Path) -> Path:
    """The file of the one entry."""
    assert store.put(HEADER, SECTIONS)
    found = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(found) == 1 and found[0].stat().st_size == PARTS["end"]
    return found[0]


def read(store: DirectoryStore, header: EntryHeader = HEADER) -> list[bytes] | None:
    """All bytes of the entry; None for a miss, at once or while reading."""
    found = store.get(header.key, header)
    try:
        return None if found is None else contents(found)
    except DamagedEntryError:
        return None


def assert_is_given_up(store: DirectoryStore, path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A miss, with one warning that names the file; afterwards the place is free for a good one."""
    caplog.clear()
    before = store.stats().damaged
    assert read(store) is None
    assert store.stats().damaged == before + 1
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert str(path) in caplog.text and "not used" in caplog.text
    assert not path.exists()
    assert store.put(HEADER, SECTIONS) and read(store) == SECTIONS


def test_parts_cover_the_file(path: Path) -> None:
    data = path.read_bytes()
    assert data[:8] == entry.MAGIC and data[PARTS["json"]] == ord("{")
    assert data[PARTS["tokens"] : PARTS["checksums"]] == HEADER.token_ids
    assert data[HEAD_BYTES:] == b"".join(SECTIONS)


def test_every_flipped_bit_of_every_byte(
    store: DirectoryStore, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One bit of each byte in turn, the whole file over; the warning tells the part."""
    good = path.read_bytes()
    places = list(PARTS.values())
    words: dict[str, set[str]] = {name: set() for name in PARTS}
    for at in range(len(good)):
        bad = bytearray(good)
        bad[at] ^= 1 << (at % 8)
        path.write_bytes(bad)
        assert_is_given_up(store, path, caplog)
        part = list(PARTS)[sum(at >= place for place in places) - 1]
        words[part].add(caplog.text.split("not used: ")[1].split("\n")[0])
    assert words["magic"] == {"it is no entry of a KV store"}
    assert all("version" in word for word in words["version"]) and words["version"]
    for part in ("json", "tokens", "checksums", "checksum of the head"):
        assert words[part] == {"the checksum of its head is wrong"}
    assert words["section a"] == {"the checksum of section a is wrong"}
    assert words["section b"] == {"the checksum of section b is wrong"}


def test_every_length(store: DirectoryStore, path: Path, caplog: pytest.LogCaptureFixture) -> None:
    good = path.read_bytes()
    for length in range(len(good)):
        path.write_bytes(good[:length])
        assert_is_given_up(store, path, caplog)
    for extra in (b"\0", good):
        path.write_bytes(good + extra)
        assert_is_given_up(store, path, caplog)


@pytest.mark.parametrize("data", [b"", b"hello", bytes(4096), b"DIKVENT\x1a" + b"\xff" * 4096], ids=len)
def test_foreign_contents(
    store: DirectoryStore, path: Path, data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    path.write_bytes(data)
    assert_is_given_up(store, path, caplog)


def test_an_entry_under_another_name(
    store: DirectoryStore, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A whole entry, but of another key."""
    other, sections = toy_entry(2, 60)
    store.put(other, sections)
    good = Path(store._index.path(str(other.key))).read_bytes()
    path.write_bytes(good)
    assert_is_given_up(store, path, caplog)


def test_a_head_that_lies(store: DirectoryStore, path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Right checksums over a head that is not what was asked for, or is none."""
    digests = entry.digests_of(SECTIONS)
    fields = vars(HEADER)
    for change in (
        {"sections": (("a", 20), ("b", 40))},
        {"token_ids": bytes(16)},
        {"num_tokens": 9},
        {"identity": bytes(32)},
    ):
        head = EntryHeader(**{**fields, **change}).encode(digests[: len(change.get("sections", digests))])
        path.write_bytes(head + b"".join(SECTIONS))
        assert_is_given_up(store, path, caplog)
    for text in (b"[]", b"{}", b"nonsense", HEADER.encode(digests)[24 : 24 + NUM_JSON].replace(b"20", b"-1")):
        head = struct.pack("<8sIIII", entry.MAGIC, entry.VERSION, len(text), 4, 3) + text
        head += HEADER.token_ids + b"".join(digests)
        head += entry.hashlib.sha256(head).digest()
        path.write_bytes(head + b"".join(SECTIONS))
        assert_is_given_up(store, path, caplog)


def test_truncated_while_it_is_read(store: DirectoryStore, path: Path) -> None:
    found = store.get(HEADER.key, HEADER)
    os.truncate(path, HEAD_BYTES + 30)
    assert bytes(found.read(0)) == SECTIONS[0]
    with pytest.raises(DamagedEntryError, match="ends"):
        found.read(2)
    assert not path.exists() and store.stats().damaged == 1


def test_overwritten_while_it_is_read(store: DirectoryStore, path: Path) -> None:
    found = store.get(HEADER.key, HEADER)
    with open(path, "r+b") as file:
        file.seek(PARTS["section b"])
        file.write(bytes(40))
    with pytest.raises(DamagedEntryError, match="checksum of section b"):
        found.read(2)


def test_replaced_while_it_is_read(
    store: DirectoryStore, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its file open a reader keeps the old bytes; without, it takes the new ones as a whole section."""
    others = [bytes(len(data)) for data in SECTIONS]
    held = store.get(HEADER.key, HEADER)
    monkeypatch.setattr(directory_store, "MAX_OPEN", 0)
    reopened = store.get(HEADER.key, HEADER)
    store.put(HEADER, others, replace=True)
    assert contents(held) == SECTIONS
    assert contents(reopened) == others
    store.remove(HEADER.key)
    with pytest.raises(DamagedEntryError, match="gone"):
        reopened.read(0)


def test_something_else_in_its_place(
    store: DirectoryStore, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A directory or a pipe where a file should be: a miss, and no waiting for a writer."""
    path.unlink()
    os.mkfifo(path)
    assert read(store) is None and "no regular file" in caplog.text and not path.exists()
    path.mkdir()
    assert read(store) is None and not store.put(HEADER, SECTIONS)
    assert path.is_dir()  # it is not ours to remove


def test_damage_that_cannot_be_removed(
    store: DirectoryStore, path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is not looked at again until a good entry takes its place."""
    path.write_bytes(b"x" * PARTS["end"])

    def refuse(*_: object) -> None:
        raise PermissionError(13, "no")

    monkeypatch.setattr(directory_store.os, "unlink", refuse)
    assert read(store) is None and "cannot remove" in caplog.text
    caplog.clear()
    assert read(store) is None and not store.contains(HEADER.key) and not caplog.records
    assert store.put(HEADER, SECTIONS) and read(store) == SECTIONS


def test_large_heads(store: DirectoryStore) -> None:
    """The head of a state names every token: here more than the first read takes in."""
    tokens = np.arange(100_000, dtype="<i4").tobytes()
    header = EntryHeader(HEADER.key, bytes(32), bytes(32), 100_000, tokens, (("a", 60),))
    data = [b"".join(SECTIONS)]
    assert store.put(header, data)
    assert contents(store.get(header.key, header)) == data
    path = Path(store._index.path(str(header.key)))
    os.truncate(path, 300_000)
    assert store.get(header.key, header) is None and store.stats().damaged == 1
