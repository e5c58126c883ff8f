"""PrefixExchange: prefixes between an engine's prefix cache and a KV store.

Before each plan the waiting sequences that it may admit are looked up in the store: what the cache does not
know is loaded, while the device works on the step before, and published, so that the scheduler finds it like
anything else. After each commit the borders whose state has become known go to the store, on a thread.

Bytes go into and out of the pools through the device's queue, so they keep their order with the steps around.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from deepinfer.engine.executor import Executor
from deepinfer.kv_transfer.entry import DamagedEntryError
from deepinfer.kv_transfer.prefix import PrefixChain, PrefixLoad, PrefixStore
from deepinfer.kv_transfer.store import KVStore
from deepinfer.runtime.caches import Caches

MAX_LOADING_BYTES = 256 << 20  # of host memory that loads of one plan may fill at once


@dataclass
class ExchangeStats:
    """Totals since the start.

    Attributes:
        num_lookups: sequences whose prefix was looked up in the store.
        num_loaded: prefixes that were loaded from it, with num_loaded_tokens.
        num_failed: loads that came to nothing: damage, or no room in the cache.
        num_kept: borders that were given to it.
    """

    num_lookups: int = 0
    num_loaded: int = 0
    num_loaded_tokens: int = 0
    num_failed: int = 0
    num_kept: int = 0


class PrefixExchange:
    """An engine's connection with a store.

    Args:
        core: the engine's core.
        executor: its device queue.
        caches: its pools.
        prefixes: the store as this engine names things in it; closed with the exchange.
        owns_store: close the store as well.
    """

    def __init__(
        self, core: Any, executor: Executor, caches: Caches, prefixes: PrefixStore, owns_store: bool
    ) -> None:
        self.stats = ExchangeStats()
        self._core = core
        self._executor = executor
        self._caches = caches
        self._prefixes = prefixes
        self._owns_store = owns_store
        self._block_size = prefixes.identity.block_size
        core.start_reporting_prefixes()

    @property
    def store(self) -> KVStore:
        """Where prefixes are kept."""
        return self._prefixes.store

    def fetch(self) -> None:
        """Load what the sequences that the next plan may admit need and the cache lacks."""
        arrivals = self._core.take_arrivals()
        waiting: list[_Loading] = []
        num_bytes, seen = 0, set()
        for seq_id in arrivals:
            with contextlib.suppress(KeyError):  # ended by another thread
                loading = self._begin(seq_id, seen)
                if loading is None:
                    continue
                waiting.append(loading)
                num_bytes += loading.num_bytes
                if num_bytes > MAX_LOADING_BYTES:
                    self._end(waiting)
                    num_bytes = 0
        self._end(waiting)

    def keep(self) -> None:
        """Give borders that have become known to the store."""
        for tokens, blocks, slot in self._core.take_published_borders():
            chain = self._prefixes.chain(tokens)
            border = len(blocks)
            missing = {
                index: block
                for index, block in enumerate(blocks.tolist())
                if not self.store.contains(chain.block(index).key)
            }
            is_stored = self.store.contains(chain.state(border).key)
            if missing or not is_stored:
                self.stats.num_kept += 1
                self._executor.run(self._save, chain, border, missing, 0 if is_stored else slot)

    def reset(self) -> None:
        """The weights may have changed: from now on entries have names that nobody else uses."""
        identity = self._prefixes.identity
        self._prefixes.rename(replace(identity, model=f"{identity.model} {secrets.token_hex(16)}"))

    def flush(self) -> None:
        """Wait until everything is written that `keep` has taken."""
        self._executor.run(lambda: None).result()
        self._prefixes.flush()

    def close(self) -> None:
        """Write what is waiting and let go of the store."""
        self._prefixes.close()
        if self._owns_store:
            self.store.close()
        del self._caches, self._executor  # the stats stay

    def _begin(self, seq_id: int, seen: set[bytes]) -> _Loading | None:
        """Begin to load a sequence's prefix; None when the store has nothing that helps."""
        tokens = np.concatenate([self._core.prompt_token_ids(seq_id), self._core.output_token_ids(seq_id)])
        resumable, known = (num_tokens // self._block_size for num_tokens in self._core.find_prefix(seq_id))
        most = (len(tokens) - 1) // self._block_size
        if resumable >= most:
            return None
        self.stats.num_lookups += 1
        chain = self._prefixes.chain(tokens)
        border = self._prefixes.find(chain, most, num_known=known, resumable=resumable)
        if border == 0 or chain.digest(border) in seen:
            return None
        seen.add(chain.digest(border))
        layout = self._prefixes.layout
        blocks = np.zeros((max(0, border - known), layout.block_bytes), np.uint8)
        state = np.zeros(layout.slot_bytes, np.uint8)
        load = self._prefixes.load(chain, border, list(blocks), state)
        if load is None:
            self.stats.num_failed += 1
            return None
        return _Loading(seq_id, border, border - len(blocks), blocks, state, load)

    def _end(self, waiting: list[_Loading]) -> None:
        """Publish what has been loaded; empties the list."""
        for loading in _taken(waiting):
            try:
                loading.load.wait()
                is_published = self._publish(loading)
            except (DamagedEntryError, KeyError):
                is_published = False
            self.stats.num_loaded += is_published
            self.stats.num_loaded_tokens += loading.border * self._block_size * is_published
            self.stats.num_failed += not is_published

    def _publish(self, loading: _Loading) -> bool:
        """Put a loaded prefix into the pools and the cache; False when it has no place there."""
        held = self._core.reserve_prefix(loading.seq_id, loading.border * self._block_size)
        if held is None:
            return False
        num_known, blocks, slot = held
        if num_known < loading.first:  # something was evicted meanwhile
            self._core.cancel_prefix()
            return False
        rows = torch.from_numpy(loading.blocks[num_known - loading.first :])
        written = self._executor.run(self._fill, blocks, rows, slot, torch.from_numpy(loading.state))
        if written.done():
            written.result()
        self._core.publish_prefix()
        return True

    def _fill(self, blocks: np.ndarray, rows: torch.Tensor, slot: int, state: torch.Tensor) -> None:
        """On the device's queue: write blocks and a slot."""
        if len(blocks):
            self._caches.blocks[torch.from_numpy(blocks).long()] = rows.to(self._caches.blocks.device)
        self._caches.slots[slot] = state.to(self._caches.slots.device)

    def _save(self, chain: PrefixChain, border: int, blocks: dict[int, int], slot: int) -> None:
        """On the device's queue: copy blocks and a slot (0: none) to be written later."""
        rows = {index: self._caches.blocks[block].cpu().numpy() for index, block in blocks.items()}
        state = self._caches.slots[slot].cpu().numpy() if slot else None
        self._prefixes.put_later(chain, border, rows, state)


@dataclass(frozen=True)
class _Loading:
    """A prefix on its way: blocks first ... border - 1, and the state behind them."""

    seq_id: int
    border: int
    first: int
    blocks: np.ndarray  # uint8 [border - first, block_bytes]
    state: np.ndarray  # uint8 [slot_bytes]
    load: PrefixLoad

    @property
    def num_bytes(self) -> int:
        return self.blocks.nbytes + self.state.nbytes


def _taken(waiting: list[_Loading]) -> Iterator[_Loading]:
    """The members of a list, taken out of it one by one; what an interrupt leaves is cancelled."""
    try:
        while waiting:
            yield waiting.pop(0)
    finally:
        for loading in waiting:
            loading.load.cancel()
        waiting.clear()
