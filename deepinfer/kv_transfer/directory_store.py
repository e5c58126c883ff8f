"""DirectoryStore: one file for each entry, in a directory that several processes and hosts may share.

    <directory>/v1/<first two hex digits>/<64 hex digits>.<kind>      the format is that of entry.py

Files appear whole: they are written beside their place and renamed. They are never changed, only replaced or
removed, so a reader that has one open keeps reading what it began with. Nothing locks. What a crash tears
fails a checksum when it is read.

Only files of this naming, and abandoned temporary ones of this module, are ever removed.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace as replace_fields
from pathlib import Path

from deepinfer.kv_transfer.entry import (
    FIXED_BYTES,
    VERSION,
    DamagedEntryError,
    EntryHead,
    EntryHeader,
    EntryKey,
    check_header,
    decode_head,
    digests_of,
    head_bytes,
)
from deepinfer.kv_transfer.file_index import FileIndex
from deepinfer.kv_transfer.store import (
    Buffer,
    KVStore,
    SeldomWarner,
    StoredEntry,
    StoreStats,
    check_sizes,
    logger,
)

MAX_OPEN = 64  # entries that keep their file open; further ones open it for each section
PAUSE_S = 5.0  # no writes for so long after the system refused one
_FIRST_READ = 1 << 14  # bytes; the head of most entries


class DirectoryStore(KVStore):
    """Keeps entries as files.

    Args:
        directory: where; made when needed. Files are readable by their owner only.
        max_bytes: most bytes of all entries, None for no limit. Several processes may together exceed it by
            a sixteenth for each, until the next of them looks.
        sync: flush each file to the disk before it gets its name. Without it a crash of the machine may lose
            or tear the newest entries; checksums make that a miss.

    A directory that cannot be made or used is a warning, and every call then a miss.

    Raises:
        ValueError: `directory` is something else, or the limit is not positive.
    """

    def __init__(
        self, directory: str | os.PathLike[str], max_bytes: int | None = None, *, sync: bool = False
    ) -> None:
        if max_bytes is not None and max_bytes < 1:
            raise ValueError(f"max_bytes is {max_bytes}; it must be at least 1, or None for no limit")
        self._root = Path(directory) / f"v{VERSION}"
        if os.path.exists(directory) and not os.path.isdir(directory):
            raise ValueError(f"{directory} is not a directory; name one for the KV store, or a new path")
        self._sync = sync
        self._bad: set[str] = set()  # damaged files that could not be removed
        self._stats = StoreStats()
        self._lock = threading.Lock()
        self._warner = SeldomWarner()
        self._num_open = 0
        self._paused_until = float("-inf")
        self._is_closed = False
        try:
            self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            self._note_refusal("open", error)
        self._index = FileIndex(self._root, max_bytes)

    def put(self, header: EntryHeader, sections: Sequence[Buffer], *, replace: bool = False) -> bool:
        check_sizes(header, sections)
        name = str(header.key)
        if self._is_closed or time.monotonic() < self._paused_until:
            return False
        if not replace and name not in self._bad and self._is_whole(header):
            self._touch(self._index.path(name), name)
            return True
        head = header.encode(digests_of(sections))
        num_bytes = len(head) + header.num_bytes
        if not self._has_room(name, num_bytes):
            return False
        try:
            used_ns = self._index.now_ns()
            _write(self._index.path(name), [head, *sections], used_ns, self._sync)
        except OSError as error:
            self._paused_until = time.monotonic() + PAUSE_S
            self._note_refusal("write", error)
            return False
        self._index.note_written(name, num_bytes, used_ns)
        with self._lock:
            self._bad.discard(name)
            self._stats.puts += 1
            self._stats.bytes_written += num_bytes
        return True

    def get(self, key: EntryKey, expected: EntryHeader | None = None) -> StoredEntry | None:
        entry = None if self._is_closed or str(key) in self._bad else self._open(key, expected)
        with self._lock:
            self._stats.count_get(entry)
        return entry

    def contains(self, key: EntryKey) -> bool:
        name = str(key)
        return not self._is_closed and name not in self._bad and os.path.isfile(self._index.path(name))

    def remove(self, key: EntryKey) -> bool:
        self._index.drop(str(key))
        try:
            os.unlink(self._index.path(str(key)))
        except FileNotFoundError:
            return False
        except OSError as error:
            self._note_refusal("remove", error)
            return False
        return True

    def stats(self) -> StoreStats:
        num_entries, num_bytes = self._index.size()
        with self._lock:
            return replace_fields(self._stats, num_entries=num_entries, num_bytes=num_bytes)

    def close(self) -> None:
        self._is_closed = True

    def _open(self, key: EntryKey, expected: EntryHeader | None) -> _FileEntry | None:
        name = str(key)
        path = self._index.path(name)
        file = -1
        try:
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            entry = _FileEntry(self, path, _read_head(file, key, expected))
            self._touch(file, name)
        except FileNotFoundError:
            self._index.drop(name)
            return None
        except DamagedEntryError as error:
            os.close(file)
            self._drop_damaged(key, error)
            return None
        except OSError as error:
            if file >= 0:
                os.close(file)
            self._note_refusal("read", error)
            return None
        if self._count_open(1):
            entry.file = file
        else:
            os.close(file)
        return entry

    def _count_open(self, change: int) -> bool:
        """Count an open file; False, and not counted, when there are enough."""
        with self._lock:
            if change > 0 and self._num_open >= MAX_OPEN:
                return False
            self._num_open += change
            return True

    def _touch(self, file: int | str, name: str) -> None:
        """An entry is used now; the file says so too, for later starts and other processes."""
        used_ns = self._index.now_ns()
        try:
            os.utime(file, ns=(used_ns, used_ns))
        except FileNotFoundError:
            return
        except OSError as error:  # a directory that may only be read still serves
            self._note_refusal("touch", error)
        self._index.touch(name, used_ns)

    def _drop_damaged(self, key: EntryKey, error: DamagedEntryError) -> None:
        name = str(key)
        path = self._index.path(name)
        logger.warning("KV store: %s is removed and not used: %s", path, error)
        self._index.drop(name)
        with self._lock:
            self._stats.damaged += 1
        try:
            os.unlink(path)
        except FileNotFoundError:
            pass
        except OSError as refusal:
            self._bad.add(name)
            self._note_refusal("remove", refusal)

    def _is_whole(self, header: EntryHeader) -> bool:
        """Whether a file of the right size is there; what it holds shows when it is read."""
        size = len(header.encode([bytes(32)] * len(header.sections))) + header.num_bytes
        try:
            found = os.stat(self._index.path(str(header.key)))
        except OSError:
            return False
        return stat.S_ISREG(found.st_mode) and found.st_size == size

    def _has_room(self, name: str, num_bytes: int) -> bool:
        """Whether an entry of this size may be written, after evicting others."""
        limit = self._index.max_bytes
        if limit is not None and num_bytes > limit:
            self._warner.warn("size", f"KV store: an entry of {num_bytes} bytes exceeds its limit of {limit}")
            return False
        return self._index.make_room(name, num_bytes, self._evict)

    def _evict(self, path: str) -> bool:
        try:
            os.unlink(path)
        except FileNotFoundError:
            return True
        except OSError as error:
            self._note_refusal("remove", error)
            return False
        with self._lock:
            self._stats.evicted += 1
        return True

    def _note_refusal(self, action: str, error: OSError) -> None:
        """The system refused something: counted, with a warning now and then."""
        with self._lock:
            self._stats.errors += 1
        reason = errno.errorcode.get(error.errno or 0, "OSError")
        self._warner.warn(action, f"KV store: cannot {action} in {self._root}: {reason}: {error}")


class _FileEntry(StoredEntry):
    """An entry of a directory; `file` is its open file, None when there are too many."""

    def __init__(self, store: DirectoryStore, path: str, head: EntryHead) -> None:
        self.head = head
        self.file: int | None = None
        self._store = store
        self._path = path

    def _read(self, section: int, out: memoryview) -> None:
        offset = sum(size for _, size in self.header.sections[:section])
        if self.file is not None:
            _read_fully(self.file, out, self.head.num_bytes + offset)
            return
        try:
            file = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise DamagedEntryError(f"it is gone: {error}") from error
        try:  # another process may have replaced the file by one that holds the same thing
            self.head = _read_head(file, self.header.key, self.header)
            _read_fully(file, out, self.head.num_bytes + offset)
        finally:
            os.close(file)

    def _give_up(self, error: DamagedEntryError) -> None:
        self._store._drop_damaged(self.header.key, error)

    def close(self) -> None:
        file, self.file = self.file, None
        if file is not None:
            os.close(file)
            self._store._count_open(-1)

    def __del__(self) -> None:
        self.close()


def _write(path: str, parts: Sequence[Buffer], used_ns: int, sync: bool) -> None:
    """Write a file beside its place, then rename it. Raises OSError, leaving nothing behind."""
    folder = os.path.dirname(path)
    temporary = f"{folder}/.{os.getpid()}-{secrets.token_hex(8)}.tmp"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        file = os.open(temporary, flags, 0o600)
    except FileNotFoundError:
        os.makedirs(folder, mode=0o700, exist_ok=True)
        file = os.open(temporary, flags, 0o600)
    try:
        try:
            for part in parts:
                rest = memoryview(part).cast("B")
                while rest.nbytes:
                    rest = rest[os.write(file, rest) :]
            os.utime(file, ns=(used_ns, used_ns))
            if sync:
                os.fsync(file)
        finally:
            os.close(file)
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise
    if sync:
        file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(file)
        finally:
            os.close(file)


def _read_head(file: int, key: EntryKey, expected: EntryHeader | None) -> EntryHead:
    """The head of an open file, proved. Raises DamagedEntryError."""
    try:
        found = os.fstat(file)
        if not stat.S_ISREG(found.st_mode):
            raise DamagedEntryError("it is no regular file")
        head = os.pread(file, _FIRST_READ, 0)
    except OSError as error:
        raise DamagedEntryError(f"it cannot be read: {error}") from error
    size = head_bytes(head[:FIXED_BYTES])
    if size > found.st_size:
        raise DamagedEntryError(f"it ends after {found.st_size} bytes, inside its head of {size}")
    if size > len(head):
        rest = bytearray(size - len(head))
        _read_fully(file, memoryview(rest), len(head))
        head += rest
    decoded = decode_head(head[:size])
    if decoded.header.key != key:
        raise DamagedEntryError(f"it belongs to the key {decoded.header.key}")
    if expected is not None:
        check_header(decoded.header, expected)
    if found.st_size != decoded.total_bytes:
        raise DamagedEntryError(f"it has {found.st_size} bytes, its head says {decoded.total_bytes}")
    return decoded


def _read_fully(file: int, out: memoryview, offset: int) -> None:
    """Fill `out` from an offset. Raises DamagedEntryError when the file ends before, or cannot be read."""
    rest = out.cast("B")
    while rest.nbytes:
        try:
            count = os.preadv(file, [rest], offset)
        except OSError as error:
            raise DamagedEntryError(f"it cannot be read: {error}") from error
        if count == 0:
            raise DamagedEntryError(f"it ends after {offset} bytes")
        rest, offset = rest[count:], offset + count
