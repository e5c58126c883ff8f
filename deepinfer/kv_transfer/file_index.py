"""FileIndex: what one process believes of a store's directory, and which files go when it is full.

A file's modification time is the time of its last use, so the order of eviction survives restarts and is the
same for all processes. The index knows this process's files at once and those of others after its next look
at the directory; before a file goes, its time is read again.
"""

from __future__ import annotations

import heapq
import os
import re
import stat
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from deepinfer.kv_transfer.entry import KINDS

SCAN_SHARE = 16  # a process looks at the directory again after writing 1/16 of the limit
SCAN_INTERVAL_S = 60.0  # or before evicting, when its last look is older
ABANDONED_S = 3600.0  # age of a temporary file whose writer must be gone

_NAME = re.compile(rf"[0-9a-f]{{64}}\.({'|'.join(KINDS)})")
_TEMPORARY = re.compile(r"\.[0-9]+-[0-9a-f]{16}\.tmp")


class FileIndex:
    """Entries of a directory by name, the least recently used first.

    Args:
        root: holds folders of two hex digits, which hold files named as entries.
        max_bytes: limit of all files, None for none.
    """

    def __init__(self, root: Path, max_bytes: int | None) -> None:
        self.max_bytes = max_bytes
        self._root = root
        self._files: dict[str, tuple[int, int]] = {}  # name -> (bytes, nanoseconds of the last use)
        self._order: list[tuple[int, str]] = []  # heap of (last use, name); outdated pairs are skipped
        self._total_bytes = 0
        self._written_since_scan = 0
        self._scanned_at = float("-inf")
        self._last_ns = 0
        self._lock = threading.Lock()
        with self._lock:
            self._scan()

    def size(self) -> tuple[int, int]:
        """Number of files, and bytes."""
        with self._lock:
            return len(self._files), self._total_bytes

    def now_ns(self) -> int:
        """Wall time, later than whatever this index answered before."""
        with self._lock:
            self._last_ns = max(time.time_ns(), self._last_ns + 1)
            return self._last_ns

    def note_written(self, name: str, num_bytes: int, used_ns: int) -> None:
        """This process wrote a file."""
        with self._lock:
            self._set(name, num_bytes, used_ns)
            self._written_since_scan += num_bytes

    def touch(self, name: str, used_ns: int) -> None:
        """A file was used; one that is not in the index stays out."""
        with self._lock:
            if name in self._files:
                self._set(name, self._files[name][0], used_ns)

    def drop(self, name: str) -> None:
        """A file is gone."""
        with self._lock:
            self._drop(name)

    def path(self, name: str) -> str:
        """Where an entry lies."""
        return f"{self._root}/{name[:2]}/{name}"

    def make_room(self, name: str, num_bytes: int, unlink: Callable[[str], bool]) -> bool:
        """Evict until a file fits into the limit.

        Args:
            name: of the file; one that it replaces counts no more.
            num_bytes: its size, not beyond the limit.
            unlink: removes a file; False ends the attempt.

        Returns:
            Whether there is room.
        """
        if self.max_bytes is None:
            return True
        with self._lock:
            self._drop(name)
            room = self.max_bytes - num_bytes
            is_stale = time.monotonic() - self._scanned_at > SCAN_INTERVAL_S
            if self._written_since_scan > self.max_bytes // SCAN_SHARE or (
                is_stale and self._total_bytes > room
            ):
                self._scan()
                self._drop(name)
            spared: set[str] = set()
            while self._total_bytes > room:
                victim = self._oldest()
                used_ns = self._use_on_disk(victim)
                if used_ns > self._files[victim][1] and victim not in spared:
                    spared.add(victim)
                    self._set(victim, self._files[victim][0], used_ns)
                    continue
                self._drop(victim)
                if not unlink(self.path(victim)):
                    return False
            return True

    def _oldest(self) -> str:
        """The least recently used file; there is one, for the index holds bytes."""
        while True:
            used_ns, name = self._order[0]
            if self._files.get(name, (0, -1))[1] == used_ns:
                return name
            heapq.heappop(self._order)

    def _use_on_disk(self, name: str) -> int:
        """Another process may have used a file after this one knew of."""
        try:
            return os.stat(self.path(name)).st_mtime_ns
        except OSError:
            return -1

    def _set(self, name: str, num_bytes: int, used_ns: int) -> None:
        self._drop(name)
        self._files[name] = num_bytes, used_ns
        self._total_bytes += num_bytes
        heapq.heappush(self._order, (used_ns, name))
        if len(self._order) > 64 + 4 * len(self._files):
            self._order = [(used, each) for each, (_, used) in self._files.items()]
            heapq.heapify(self._order)

    def _drop(self, name: str) -> None:
        num_bytes, _ = self._files.pop(name, (0, 0))
        self._total_bytes -= num_bytes

    def _scan(self) -> None:
        """Learn what the directory holds; remove what crashed writers left."""
        self._files.clear()
        self._order.clear()
        self._total_bytes = 0
        for name, num_bytes, used_ns in self._found():
            self._set(name, num_bytes, used_ns)
        self._written_since_scan = 0
        self._scanned_at = time.monotonic()

    def _found(self) -> Iterator[tuple[str, int, int]]:
        """(name, bytes, last use) of every entry; an unreadable part of the directory counts as empty."""
        oldest_writer = time.time() - ABANDONED_S
        for folder in _scandir(self._root):
            if len(folder.name) != 2 or not folder.is_dir(follow_symlinks=False):
                continue
            for file in _scandir(folder.path):
                try:
                    if _NAME.fullmatch(file.name) and file.name[:2] == folder.name:
                        found = file.stat(follow_symlinks=False)
                        if stat.S_ISREG(found.st_mode):
                            yield file.name, found.st_size, found.st_mtime_ns
                    elif _TEMPORARY.fullmatch(file.name) and file.stat().st_mtime < oldest_writer:
                        os.unlink(file.path)
                except OSError:  # gone meanwhile
                    continue


def _scandir(path: str | Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(path) as entries:
            return list(entries)
    except OSError:
        return []
