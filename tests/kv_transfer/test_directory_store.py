"""The directory: restarts, other people's files, refusals of the system, several processes."""

from __future__ import annotations

import errno
import multiprocessing
import os
import random
import signal
import stat
import time
from pathlib import Path

import pytest

from deepinfer.kv_transfer import directory_store, file_index
from deepinfer.kv_transfer.directory_store import DirectoryStore
from tests.kv_transfer.toys import contents, entry

SPAWN = multiprocessing.get_context("spawn")


def files_of(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if path.is_file())


def total_bytes(directory: Path) -> int:
    return sum(path.stat().st_size for path in files_of(directory))


def test_where_things_lie(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path / "new" / "place", sync=True)
    header, sections = entry(1)
    assert store.put(header, sections)
    name = header.key.digest.hex()
    (path,) = files_of(tmp_path)
    assert path == tmp_path / "new" / "place" / "v1" / name[:2] / f"{name}.block"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_restart(tmp_path: Path) -> None:
    """A new store finds what an old one kept, with its bytes counted and the order of use remembered."""
    first = DirectoryStore(tmp_path, 1 << 20)
    for number in range(6):
        first.put(*entry(number, 900))
    assert first.get(entry(0)[0].key) is not None  # 1 is the oldest now
    size = first.stats().num_bytes // 6
    first.close()
    second = DirectoryStore(tmp_path, 6 * size)
    assert second.stats().num_entries == 6 and second.stats().num_bytes == total_bytes(tmp_path)
    for number in range(6):
        assert contents(second.get(entry(number, 900)[0].key)) == entry(number, 900)[1]
    third = DirectoryStore(tmp_path, 6 * size)
    third.get(entry(0)[0].key)
    third.put(*entry(6, 900))
    third.put(*entry(7, 900))
    held = [n for n in range(8) if third.contains(entry(n)[0].key)]
    assert held == [0, 3, 4, 5, 6, 7]


def test_a_smaller_limit_after_a_restart(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    for number in range(10):
        store.put(*entry(number, 900))
    size = store.stats().num_bytes // 10
    smaller = DirectoryStore(tmp_path, 4 * size)
    smaller.put(*entry(10, 900))
    assert total_bytes(tmp_path) == 4 * size
    assert [n for n in range(11) if smaller.contains(entry(n)[0].key)] == [7, 8, 9, 10]


def test_foreign_files_are_never_touched(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path, 4000)
    store.put(*entry(0, 900))
    (inside,) = files_of(tmp_path)
    foreign = [
        tmp_path / "notes.txt",
        tmp_path / "v1" / "readme",
        tmp_path / "v2" / "ab" / ("ab" + "0" * 62 + ".block"),
        inside.parent / "backup.block",
        inside.parent / (inside.name + ".bak"),
        inside.parent / ".hidden.tmp",
        tmp_path / "v1" / "zzz" / inside.name,
    ]
    for path in foreign:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x" * 5000)
        os.utime(path, (0, 0))
    link = inside.parent / (inside.name[:2] + "f" * 62 + ".block")
    link.symlink_to(tmp_path / "notes.txt")
    reopened = DirectoryStore(tmp_path, 4000)
    assert reopened.stats().num_entries == 1
    for number in range(1, 12):
        assert reopened.put(*entry(number, 900))
    assert reopened.stats().evicted > 5
    assert all(path.read_bytes() == b"x" * 5000 for path in foreign) and link.is_symlink()


def test_what_a_crashed_writer_left(tmp_path: Path) -> None:
    """Old temporary files go at the next start; young ones may belong to somebody."""
    store = DirectoryStore(tmp_path, 4000)
    store.put(*entry(0))
    folder = files_of(tmp_path)[0].parent
    old, young = folder / ".123-0123456789abcdef.tmp", folder / ".124-0123456789abcdef.tmp"
    for path in (old, young):
        path.write_bytes(b"half")
    long_ago = time.time() - file_index.ABANDONED_S - 10
    os.utime(old, (long_ago, long_ago))
    again = DirectoryStore(tmp_path, 4000)
    assert not old.exists() and young.exists() and again.stats().num_entries == 1


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EIO, errno.EROFS])
def test_refused_writes(
    tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One warning, nothing left behind, a pause, and then writing goes on."""
    store = DirectoryStore(tmp_path)
    store.put(*entry(0))
    real = os.write
    calls = 0

    def refuse(file: int, data: bytes) -> int:
        nonlocal calls
        calls += 1
        if calls % 3 == 0:
            raise OSError(number, os.strerror(number))
        return real(file, data[: len(data) // 2 or 1])  # writes are short before they fail

    monkeypatch.setattr(directory_store.os, "write", refuse)
    assert not store.put(*entry(1))
    assert not store.put(*entry(2)) and calls == 3  # not even tried
    assert store.stats().errors == 1 and errno.errorcode[number] in caplog.text
    assert len(caplog.records) == 1 and len(files_of(tmp_path)) == 1
    assert contents(store.get(entry(0)[0].key)) == entry(0)[1]
    monkeypatch.setattr(directory_store.os, "write", real)
    store._paused_until = 0.0
    assert store.put(*entry(1)) and contents(store.get(entry(1)[0].key)) == entry(1)[1]


def test_a_directory_that_cannot_be_made(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    store = DirectoryStore(tmp_path / "file" / "below")
    assert "cannot open" in caplog.text
    assert not store.put(*entry(0)) and store.get(entry(0)[0].key) is None
    assert not store.contains(entry(0)[0].key) and store.longest_prefix([entry(0)[0].key]) == 0
    with pytest.raises(ValueError, match="not a directory"):
        DirectoryStore(tmp_path / "file")


def test_a_file_that_cannot_be_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A miss, but nothing is removed: the bytes may be good."""
    store = DirectoryStore(tmp_path)
    store.put(*entry(0))
    real = os.open

    def refuse(path: object, *args: object, **options: object) -> int:
        raise PermissionError(errno.EACCES, "no", str(path))

    monkeypatch.setattr(directory_store.os, "open", refuse)
    assert store.get(entry(0)[0].key) is None and "cannot read" in caplog.text
    monkeypatch.setattr(directory_store.os, "open", real)
    assert contents(store.get(entry(0)[0].key)) == entry(0)[1] and store.stats().errors == 1


def test_a_directory_that_may_only_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = DirectoryStore(tmp_path)
    store.put(*entry(0))

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "read-only")

    monkeypatch.setattr(directory_store.os, "utime", refuse)
    for _ in range(3):
        assert contents(store.get(entry(0)[0].key)) == entry(0)[1]
    assert len(caplog.records) == 1  # and not three


def test_eviction_that_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit stands: no room, no put."""
    store = DirectoryStore(tmp_path, 3000)
    store.put(*entry(0, 900))
    store.put(*entry(1, 900))

    def refuse(*_: object) -> None:
        raise PermissionError(errno.EACCES, "no")

    monkeypatch.setattr(directory_store.os, "unlink", refuse)
    assert not store.put(*entry(2, 900))
    assert total_bytes(tmp_path) <= 3000


def test_open_files_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory_store, "MAX_OPEN", 3)
    store = DirectoryStore(tmp_path)
    for number in range(8):
        store.put(*entry(number))
    before = len(os.listdir("/proc/self/fd"))
    found = [store.get(entry(number)[0].key) for number in range(8)]
    assert len(os.listdir("/proc/self/fd")) == before + 3
    for number, each in enumerate(found):
        assert contents(each) == entry(number)[1]
    assert len(os.listdir("/proc/self/fd")) == before and store._num_open == 0
    del found
    store.get(entry(0)[0].key)  # nobody closes it
    assert len(os.listdir("/proc/self/fd")) == before


def test_what_others_used_stays(tmp_path: Path) -> None:
    """Another store's use of an entry counts, although this one has not seen it."""
    first = DirectoryStore(tmp_path, 1 << 20)
    first.put(*entry(0, 900))
    size = first.stats().num_bytes
    mine, theirs = DirectoryStore(tmp_path, 3 * size), DirectoryStore(tmp_path, 3 * size)
    mine.put(*entry(1, 900))
    mine.put(*entry(2, 900))
    theirs.get(entry(0)[0].key)
    mine.put(*entry(3, 900))
    assert [n for n in range(4) if mine.contains(entry(n)[0].key)] == [0, 2, 3]
    theirs.remove(entry(2)[0].key)
    mine.put(*entry(4, 900))  # finds that 2 has gone
    assert mine.stats().num_bytes == total_bytes(tmp_path) <= 3 * size


# ---- several processes


def churn(directory: str, limit: int, seed: int, steps: int, results: multiprocessing.Queue) -> None:
    """Random puts and gets over shared keys; counts what was found, and what was wrong."""
    store = DirectoryStore(directory, limit)
    rng = random.Random(seed)
    found = wrong = 0
    for _ in range(steps):
        header, sections = entry(rng.randrange(20), 3000)
        if rng.random() < 0.5:
            store.put(header, sections, replace=rng.random() < 0.2)
        elif (held := store.get(header.key, header)) is not None:
            found += 1
            wrong += contents(held) != sections
    stats = store.stats()
    results.put((found, wrong, stats.damaged, stats.errors))


def test_processes_share_a_directory(tmp_path: Path) -> None:
    """Writers, readers and evictions at once: no wrong byte, no damage, no refusal, and the limit holds."""
    limit, steps = 40_000, 300
    results = SPAWN.Queue()
    workers = [
        SPAWN.Process(target=churn, args=(str(tmp_path), limit, seed, steps, results)) for seed in range(3)
    ]
    for worker in workers:
        worker.start()
    outcomes = [results.get(timeout=60) for _ in workers]
    for worker in workers:
        worker.join(30)
        assert worker.exitcode == 0
    assert all(found > 20 for found, *_ in outcomes)
    assert all(rest == [0, 0, 0] for _, *rest in outcomes), outcomes
    assert total_bytes(tmp_path) <= limit + 2 * (limit // file_index.SCAN_SHARE + 3500)
    last = DirectoryStore(tmp_path, limit)
    last.put(*entry(99, 3000))
    assert total_bytes(tmp_path) <= limit
    assert not list(tmp_path.rglob("*.tmp"))


def write_forever(directory: str) -> None:
    store = DirectoryStore(directory)
    number = 0
    while True:
        store.put(*entry(number % 4, 400_000), replace=True)
        number += 1


def test_a_writer_that_is_killed(tmp_path: Path) -> None:
    """Whenever it happens, what has a name is whole."""
    worker = SPAWN.Process(target=write_forever, args=(str(tmp_path),), daemon=True)
    worker.start()
    store = DirectoryStore(tmp_path)
    deadline = time.monotonic() + 30
    while not all(store.contains(entry(n)[0].key) for n in range(4)) and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(worker.pid, signal.SIGKILL)
    worker.join(10)
    for number in range(4):
        header, sections = entry(number, 400_000)
        assert contents(store.get(header.key, header)) == sections
    assert store.stats().damaged == 0
