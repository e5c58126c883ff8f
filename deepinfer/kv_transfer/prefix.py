"""Prefixes in a KV store: an engine's view of it, in blocks, states and layers.

What a sequence can resume from is a border of blocks: all blocks before it, and the state at it. Loading
reads layer by layer over all of them, on threads of its own, so a forward can begin with the first layer
while the later ones are still on their way.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from deepinfer.kv_transfer.entry import (
    BLOCK,
    ENCODER,
    STATE,
    DamagedEntryError,
    EntryHeader,
    EntryKey,
    EntryLayout,
    EntrySection,
)
from deepinfer.kv_transfer.keys import Identity, ImageSpan, prefix_keys
from deepinfer.kv_transfer.store import KVStore, StoredEntry, logger

EXACT = (STATE,)  # kinds of states that a sequence can resume from, the best one first
REPLAYED = (ENCODER, STATE)  # likewise, where bounded replay computes the decoder's windows anew


class PrefixChain:
    """Names of everything that a store can hold of one sequence.

    Args:
        identity: of the engine.
        layout: its entries.
        token_ids: [n] int32 of the sequence; only full blocks count.
        images: spans of the sequence, ascending.
    """

    def __init__(
        self,
        identity: Identity,
        layout: EntryLayout,
        token_ids: np.ndarray,
        images: Sequence[ImageSpan] = (),
    ) -> None:
        self._layout = layout
        self._size = identity.block_size
        self._tokens = np.array(token_ids, dtype="<i4")  # a copy: the caller's may change
        self.num_blocks = len(self._tokens) // self._size
        self._root = identity.digest()
        self._keys: list[bytes] = []
        self._more = prefix_keys(identity, self._tokens, images)

    def digest(self, num_blocks: int) -> bytes:
        """Digest of the first blocks; the root for none."""
        while len(self._keys) < num_blocks:
            self._keys.append(next(self._more))
        return self._keys[num_blocks - 1] if num_blocks else self._root

    def block(self, index: int) -> EntryHeader:
        """Header of block `index`, 0 ... num_blocks - 1."""
        return self._header(BLOCK, index + 1, index * self._size)

    def state(self, num_blocks: int, kind: str = STATE) -> EntryHeader:
        """Header of the state behind the first blocks, 1 ... num_blocks; it names every token before it.

        Args:
            num_blocks: before it.
            kind: STATE, or ENCODER for the encoder's part alone.
        """
        return self._header(kind, num_blocks, 0)

    def _header(self, kind: str, num_blocks: int, first_token: int) -> EntryHeader:
        assert 1 <= num_blocks <= self.num_blocks, f"{num_blocks=} {self.num_blocks=}"
        end = num_blocks * self._size
        return EntryHeader(
            key=EntryKey(kind, self.digest(num_blocks)),
            parent=self.digest(num_blocks - 1),
            identity=self._root,
            num_tokens=end,
            token_ids=self._tokens[first_token:end].tobytes(),
            sections=tuple((s.name, s.num_bytes) for s in self._layout.sections(kind)),
        )


class PrefixLoad:
    """A prefix on its way from a store into memory.

    Attributes:
        layers: layers that read something of it, ascending: the order in which they arrive.
    """

    def __init__(self, pieces: dict[int, list[_Piece]], entries: Sequence[StoredEntry]) -> None:
        self.layers = tuple(sorted(pieces))
        self._pieces = pieces
        self._entries = entries
        self._futures: dict[int, Future[None]] = {layer: Future() for layer in self.layers}
        self._is_cancelled = threading.Event()

    def future(self, layer: int) -> Future[None]:
        """Done when a layer's sections are in place and proved; fails with DamagedEntryError."""
        return self._futures[layer]

    def wait(self, layer: int | None = None, timeout_s: float | None = None) -> None:
        """Wait for the layers up to and including this one; for all when None.

        Raises:
            DamagedEntryError: bytes were wrong; whatever was loaded must not be used.
            TimeoutError: they have not arrived yet.
        """
        for each in self.layers if layer is None else [x for x in self.layers if x <= layer]:
            self._futures[each].result(timeout_s)

    def cancel(self, wait: bool = True) -> None:
        """Stop reading, and wait until nothing is written to the destination any more."""
        self._is_cancelled.set()
        if self.layers and wait:
            self._futures[self.layers[-1]].exception()

    def _run(self) -> None:
        """The loader thread's work."""
        failure: BaseException | None = None
        for layer in self.layers:
            future = self._futures[layer]
            try:
                for piece in self._pieces[layer] if failure is None else ():
                    if self._is_cancelled.is_set():
                        raise DamagedEntryError("loading was cancelled")
                    piece.entry.read_into(piece.section, piece.out)
            except BaseException as error:  # goes to whoever waits
                failure = error
            if layer == self.layers[-1]:
                self._close()
            if failure is None:
                future.set_result(None)
            else:
                future.set_exception(failure)

    def _close(self) -> None:
        for entry in self._entries:
            entry.close()
        self._pieces = {}


@dataclass(frozen=True)
class _Piece:
    """A section and where it goes."""

    entry: StoredEntry
    section: int
    out: memoryview


class PrefixStore:
    """A store as an engine uses it.

    Args:
        store: where entries are kept; stays the caller's.
        identity: what they depend on.
        layout: their sections.
        num_threads: loads that are read at once.
        max_pending_bytes: copies that wait to be written by `put_later`.
    """

    def __init__(
        self,
        store: KVStore,
        identity: Identity,
        layout: EntryLayout,
        *,
        num_threads: int = 2,
        max_pending_bytes: int = 256 << 20,
    ) -> None:
        if identity.block_size != layout.block_size or identity.layout != layout.fingerprint():
            raise ValueError("the identity describes another layout")
        self.store = store
        self.identity = identity
        self.layout = layout
        self.num_dropped = 0  # entries that `put_later` gave up because too many were waiting
        self._loaders = ThreadPoolExecutor(num_threads, "kv-load")
        self._writer = ThreadPoolExecutor(1, "kv-store")
        self._max_pending_bytes = max_pending_bytes
        self._pending_bytes = 0
        self._lock = threading.Lock()

    def chain(self, token_ids: np.ndarray, images: Sequence[ImageSpan] = ()) -> PrefixChain:
        """Names of what can be stored of a sequence."""
        return PrefixChain(self.identity, self.layout, token_ids, images)

    def find(
        self,
        chain: PrefixChain,
        max_blocks: int,
        num_known: int = 0,
        resumable: int = 0,
        kinds: Sequence[str] = EXACT,
    ) -> int:
        """The longest border that can be resumed from.

        Args:
            chain: the sequence.
            max_blocks: of the border at most.
            num_known: blocks that the caller has already.
            resumable: border from which the caller can resume without the store; only a later one counts.
            kinds: of states that will do.

        Returns:
            Blocks before the border; 0 when there is none.
        """
        last = min(max_blocks, chain.num_blocks)
        keys = [chain.block(index).key for index in range(num_known, last)]
        longest = min(num_known, last) + self.store.longest_prefix(keys)
        for border in range(longest, resumable, -1):
            if self.has_state(chain, border, kinds):
                return border
        return 0

    def has_state(self, chain: PrefixChain, border: int, kinds: Sequence[str]) -> bool:
        """Whether a state of one of these kinds is there."""
        return any(self.store.contains(chain.state(border, kind).key) for kind in kinds)

    def load(
        self,
        chain: PrefixChain,
        border: int,
        blocks: Sequence[np.ndarray],
        state: np.ndarray,
        kinds: Sequence[str] = EXACT,
    ) -> PrefixLoad | None:
        """Begin to load what a border needs.

        Args:
            chain: the sequence.
            border: blocks before it.
            blocks: where the last `len(blocks)` of them go, in order: [block_bytes] uint8 each, contiguous.
            state: [slot_bytes] uint8, contiguous. Bytes between sections are left as they are.
            kinds: of states that will do, the best one first; the sections of that one are loaded.

        Returns:
            None when something is not there after all. The destinations are written until the load has ended.
        """
        # From the end to the front: eviction takes the end of a prefix before its beginning.
        wanted = [([chain.state(border, kind) for kind in kinds], kinds[0], state)]
        first = border - len(blocks)
        for place in reversed(range(len(blocks))):
            wanted.append(([chain.block(first + place)], BLOCK, blocks[place]))
        entries: list[StoredEntry] = []
        pieces: dict[int, list[_Piece]] = {}
        for headers, kind, out in wanted:
            entry = self._get(headers)
            if entry is None:
                for each in entries:
                    each.close()
                return None
            entries.append(entry)
            view = self._view(kind, out)
            numbers = {name: number for number, (name, _) in enumerate(entry.header.sections)}
            for part in self.layout.sections(kind):
                target = view[part.offset : part.offset + part.num_bytes]
                pieces.setdefault(part.layer_id, []).append(_Piece(entry, numbers[part.name], target))
        load = PrefixLoad(pieces, entries)
        self._loaders.submit(load._run)
        return load

    def put_block(self, chain: PrefixChain, index: int, block: np.ndarray) -> bool:
        """Keep block `index`: [block_bytes] uint8, contiguous. Whether the store holds it now."""
        return self.store.put(chain.block(index), self._parts(BLOCK, block))

    def put_state(self, chain: PrefixChain, border: int, slot: np.ndarray, kind: str = STATE) -> bool:
        """Keep the state at a border: [slot_bytes] uint8, contiguous. Whether the store holds it now."""
        return self.store.put(chain.state(border, kind), self._parts(kind, slot))

    def put_later(
        self,
        chain: PrefixChain,
        border: int,
        blocks: Mapping[int, np.ndarray],
        slot: np.ndarray | None,
        kind: str = STATE,
    ) -> bool:
        """Copy blocks by their index, and the state at a border, and write them on a thread.

        Args:
            chain: the sequence.
            border: blocks before the state.
            blocks: [block_bytes] uint8 each, contiguous.
            slot: [slot_bytes] uint8, contiguous; None for no state.
            kind: of the state.

        Returns:
            False when too much is waiting already; then nothing was copied.
        """
        headers = [chain.block(index) for index in blocks]
        parts = [self._parts(BLOCK, block) for block in blocks.values()]
        if slot is not None:
            headers.append(chain.state(border, kind))
            parts.append(self._parts(kind, slot))
        num_bytes = sum(header.num_bytes for header in headers)
        with self._lock:
            if self._pending_bytes + num_bytes > self._max_pending_bytes:
                self.num_dropped += len(headers)
                return False
            self._pending_bytes += num_bytes
        copies = [[bytes(part) for part in each] for each in parts]
        self._writer.submit(self._write, headers, copies, num_bytes)
        return True

    def rename(self, identity: Identity) -> None:
        """From now on entries belong to another model of the same layout."""
        self.identity = identity

    def flush(self) -> None:
        """Wait until everything that `put_later` took is written."""
        self._writer.submit(lambda: None).result()

    def close(self) -> None:
        """Write what is waiting and end the threads; a second call does nothing."""
        self._writer.shutdown(wait=True)
        self._loaders.shutdown(wait=True)

    def _write(self, headers: list[EntryHeader], copies: list[list[bytes]], num_bytes: int) -> None:
        try:
            for header, parts in zip(headers, copies):
                self.store.put(header, parts)
        except Exception:  # another program's store: its fault must not go unseen, nor end the engine
            logger.exception("KV store: an entry was not written")
        finally:
            with self._lock:
                self._pending_bytes -= num_bytes

    def _get(self, headers: Sequence[EntryHeader]) -> StoredEntry | None:
        """The first of these entries that is there."""
        for header in headers[:-1]:
            if self.store.contains(header.key) and (entry := self.store.get(header.key, header)) is not None:
                return entry
        return self.store.get(headers[-1].key, headers[-1])

    def _parts(self, kind: str, array: np.ndarray) -> list[memoryview]:
        """Sections of a block or slot, not copied."""
        view = self._view(kind, array)
        sections: tuple[EntrySection, ...] = self.layout.sections(kind)
        return [view[part.offset : part.offset + part.num_bytes] for part in sections]

    def _view(self, kind: str, array: np.ndarray) -> memoryview:
        size = self.layout.block_bytes if kind == BLOCK else self.layout.slot_bytes
        assert array.dtype == np.uint8 and array.shape == (size,), f"{array.dtype=} {array.shape=} {size=}"
        return memoryview(array).cast("B")
