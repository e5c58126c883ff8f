"""MemoryStore: entries in this process's memory, the least recently used going first."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace as replace_fields

from deepinfer.kv_transfer.entry import (
    DamagedEntryError,
    EntryHead,
    EntryHeader,
    EntryKey,
    check_header,
)
from deepinfer.kv_transfer.store import Buffer, KVStore, StoredEntry, StoreStats, check_sizes, logger


class _Kept(StoredEntry):
    """An entry in memory. Readers keep it alive after its eviction."""

    def __init__(self, store: MemoryStore, head: EntryHead, sections: tuple[bytes, ...]) -> None:
        self.head = head
        self._store = store
        self._sections = sections

    def _read(self, section: int, out: memoryview) -> None:
        out.cast("B")[:] = self._sections[section]

    def _give_up(self, error: DamagedEntryError) -> None:
        self._store._drop_damaged(self.header.key, error)

    def close(self) -> None:
        pass


class MemoryStore(KVStore):
    """Keeps copies of entries, at most `max_bytes` of sections and token ids.

    Args:
        max_bytes: the limit; an entry that is larger on its own is not kept.
    """

    def __init__(self, max_bytes: int) -> None:
        if max_bytes < 1:
            raise ValueError(f"max_bytes is {max_bytes}; it must be at least 1")
        self._max_bytes = max_bytes
        self._entries: OrderedDict[EntryKey, _Kept] = OrderedDict()  # least recently used first
        self._stats = StoreStats()
        self._lock = threading.Lock()
        self._is_closed = False

    def put(self, header: EntryHeader, sections: Sequence[Buffer], *, replace: bool = False) -> bool:
        check_sizes(header, sections)
        head = EntryHead(header, digests=(), num_bytes=len(header.token_ids))
        with self._lock:
            if self._is_closed or head.total_bytes > self._max_bytes:
                return False
            if header.key in self._entries:
                if not replace:
                    self._entries.move_to_end(header.key)
                    return True
                self._forget(header.key)
            while self._stats.num_bytes + head.total_bytes > self._max_bytes:
                self._forget(next(iter(self._entries)))
                self._stats.evicted += 1
            self._entries[header.key] = _Kept(self, head, tuple(bytes(data) for data in sections))
            self._stats.num_bytes += head.total_bytes
            self._stats.num_entries += 1
            self._stats.bytes_written += head.total_bytes
            self._stats.puts += 1
            return True

    def get(self, key: EntryKey, expected: EntryHeader | None = None) -> StoredEntry | None:
        with self._lock:
            entry = self._entries.get(key)
            if entry is not None:
                self._entries.move_to_end(key)
        try:
            if entry is not None and expected is not None:
                check_header(entry.header, expected)
        except DamagedEntryError as error:
            self._drop_damaged(key, error)
            entry = None
        with self._lock:
            self._stats.count_get(entry)
        return entry

    def contains(self, key: EntryKey) -> bool:
        with self._lock:
            return key in self._entries

    def remove(self, key: EntryKey) -> bool:
        with self._lock:
            return self._forget(key)

    def stats(self) -> StoreStats:
        with self._lock:
            return replace_fields(self._stats)

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            self._entries.clear()
            self._stats.num_bytes = self._stats.num_entries = 0

    def _forget(self, key: EntryKey) -> bool:
        entry = self._entries.pop(key, None)
        if entry is None:
            return False
        self._stats.num_bytes -= entry.head.total_bytes
        self._stats.num_entries -= 1
        return True

    def _drop_damaged(self, key: EntryKey, error: DamagedEntryError) -> None:
        with self._lock:
            self._stats.damaged += 1
            self._forget(key)
        logger.warning("KV store: entry %s is not used: %s", key, error)
