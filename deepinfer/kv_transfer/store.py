"""KVStore: the interface that stores of prefix state plug into.

A store keeps entries by key and gives them back section by section, so that a reader can take layer after
layer while a forward runs. It never answers with wrong bytes and never fails an engine: whatever is missing,
damaged or unreachable is a miss, with a warning where somebody ought to know.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from deepinfer.kv_transfer.entry import (
    DamagedEntryError,
    EntryHead,
    EntryHeader,
    EntryKey,
    check_section,
)
from deepinfer.utils.logging import get_logger

logger = get_logger(__name__)

Buffer = bytes | bytearray | memoryview


@dataclass
class StoreStats:
    """Counters since the store was opened, and what it holds now.

    Attributes:
        num_entries, num_bytes: held, as far as this process knows.
        puts: entries written; those that were there already are not counted.
        hits, misses: answers of `get`.
        damaged: entries given up because their bytes were wrong.
        evicted: entries removed to keep the limit.
        errors: operations that the system refused (disk full, permissions).
        bytes_written, bytes_read: sections and heads.
    """

    num_entries: int = 0
    num_bytes: int = 0
    puts: int = 0
    hits: int = 0
    misses: int = 0
    damaged: int = 0
    evicted: int = 0
    errors: int = 0
    bytes_written: int = 0
    bytes_read: int = 0

    def count_get(self, entry: StoredEntry | None) -> None:
        """Count an answer of `get`."""
        if entry is None:
            self.misses += 1
        else:
            self.hits += 1
            self.bytes_read += entry.head.total_bytes


class StoredEntry(ABC):
    """An entry that a store has found; its bytes stay readable until `close`, whatever is evicted.

    Attributes:
        head: sizes and checksums of its sections, proved to be what was put.
    """

    head: EntryHead

    @property
    def header(self) -> EntryHeader:
        """What the entry says of itself."""
        return self.head.header

    def read_into(self, section: int, out: memoryview) -> None:
        """Read a section and prove it.

        Args:
            section: its number.
            out: writable bytes of its size. They hold anything after an error.

        Raises:
            DamagedEntryError: the bytes are not those that were put, or are gone; the store has forgotten the
                entry.
        """
        name, size = self.header.sections[section]
        if out.nbytes != size:
            raise ValueError(f"section {name} has {size} bytes, the buffer {out.nbytes}")
        try:
            self._read(section, out)
            if self.head.digests:
                check_section(name, out, self.head.digests[section])
        except DamagedEntryError as error:
            self._give_up(error)
            raise

    def read(self, section: int) -> bytearray:
        """A section's bytes; see `read_into`."""
        data = bytearray(self.header.sections[section][1])
        self.read_into(section, memoryview(data))
        return data

    @abstractmethod
    def _read(self, section: int, out: memoryview) -> None:
        """Fill `out`, or raise DamagedEntryError."""

    @abstractmethod
    def _give_up(self, error: DamagedEntryError) -> None:
        """Forget the entry, with a warning."""

    @abstractmethod
    def close(self) -> None:
        """Let go of what keeps the bytes readable. A second call does nothing."""

    def __enter__(self) -> StoredEntry:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class KVStore(ABC):
    """A store of entries. Methods may be called from several threads at once."""

    @abstractmethod
    def put(self, header: EntryHeader, sections: Sequence[Buffer], *, replace: bool = False) -> bool:
        """Keep an entry.

        Args:
            header: its name and description.
            sections: bytes of each section, as the header has them. They are the caller's again afterwards.
            replace: overwrite an entry of that key; else one that is there stays, and counts as used.

        Returns:
            Whether the store holds the entry now. False is no fault of the caller: the store has no room or
            no way to write.
        """

    @abstractmethod
    def get(self, key: EntryKey, expected: EntryHeader | None = None) -> StoredEntry | None:
        """Find an entry and prove its head; its sections are proved when they are read.

        Args:
            key: its name.
            expected: what its header has to be, tokens included; None takes any.

        Returns:
            None for a miss: it is not there, is damaged, or belongs to something else.
        """

    @abstractmethod
    def contains(self, key: EntryKey) -> bool:
        """Whether `get` would look at something; costs no read, proves nothing and counts as no use."""

    def longest_prefix(self, keys: Sequence[EntryKey]) -> int:
        """How many of the keys, from the first on, are there without a gap."""
        for place, key in enumerate(keys):
            if not self.contains(key):
                return place
        return len(keys)

    @abstractmethod
    def remove(self, key: EntryKey) -> bool:
        """Forget an entry; whether it was there."""

    @abstractmethod
    def stats(self) -> StoreStats:
        """A copy of the counters."""

    @abstractmethod
    def close(self) -> None:
        """Let go of what the store holds. A second call does nothing; other methods then miss."""

    def __enter__(self) -> KVStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def check_sizes(header: EntryHeader, sections: Sequence[Buffer]) -> None:
    """Compare the sections of an entry that is put with its header. Raises ValueError."""
    sizes = [memoryview(data).nbytes for data in sections]
    wanted = [size for _, size in header.sections]
    if sizes != wanted:
        raise ValueError(f"{header.key}: the header has sections of {wanted} bytes, got {sizes}")


class SeldomWarner:
    """Logs a warning of each kind at most once in a while, and says how often it was held back."""

    def __init__(self, interval_s: float = 60.0) -> None:
        self._interval_s = interval_s
        self._last: dict[str, tuple[float, int]] = {}
        self._lock = threading.Lock()

    def warn(self, kind: str, message: str) -> None:
        """Log `message`, unless one of its kind was logged within the interval."""
        now = time.monotonic()
        with self._lock:
            at, held_back = self._last.get(kind, (float("-inf"), 0))
            if now - at < self._interval_s:
                self._last[kind] = at, held_back + 1
                return
            self._last[kind] = now, 0
        logger.warning("%s%s", message, f" ({held_back} more like this before)" if held_back else "")
