"""PrefixExchange: prefixes between an engine's prefix cache and a KV store.

Before each plan the waiting sequences that it may admit are looked up in the store. What the cache does not
know begins to load and is published at once, so that the scheduler finds it like anything else; its bytes
come into the pools under the forward of the step that follows, layer by layer (arrivals.py). After each
commit the borders whose state has become known go to the store, on a thread.

Bytes go into and out of the pools through the device's queue, so they keep their order with the steps around.
"""

from __future__ import annotations

import contextlib
import secrets
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from deepinfer.engine.arrivals import Arrival, ArrivalGate
from deepinfer.engine.executor import Executor
from deepinfer.kv_transfer.entry import ENCODER, STATE
from deepinfer.kv_transfer.prefix import EXACT, REPLAYED, PrefixChain, PrefixStore
from deepinfer.kv_transfer.store import KVStore
from deepinfer.runtime.batch import CacheCopies
from deepinfer.runtime.caches import Caches

MAX_LOADING_BYTES = 256 << 20  # of host memory that loads may fill at once


@dataclass
class ExchangeStats:
    """Totals since the start.

    Attributes:
        num_lookups: sequences whose prefix was looked up in the store.
        num_loaded: prefixes that were loaded from it, with num_loaded_tokens.
        num_early_layers: layers that a forward had before the last layer of their prefix was read.
        num_failed: loads that came to nothing: damage, or no room in the cache.
        num_kept: borders that were given to it.
    """

    num_lookups: int = 0
    num_loaded: int = 0
    num_loaded_tokens: int = 0
    num_early_layers: int = 0
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
        self._arrivals: list[Arrival] = []  # published, and in no forward yet
        core.start_reporting_prefixes()

    @property
    def store(self) -> KVStore:
        """Where prefixes are kept."""
        return self._prefixes.store

    def fetch(self) -> None:
        """Begin to load what the sequences that the next plan may admit need and the cache lacks."""
        for seq_id in self._core.take_arrivals():
            with contextlib.suppress(KeyError):  # ended by another thread
                self._begin(seq_id)
            if sum(arrival.num_bytes for arrival in self._arrivals) > MAX_LOADING_BYTES:
                self.fill()

    def gate(self, copies: CacheCopies | None) -> ArrivalGate | None:
        """What the step that is launched next has to wait for, whoever is in it; None for nothing.

        Args:
            copies: of that step.
        """
        if not self._arrivals:
            return None
        arrivals, self._arrivals = self._arrivals, []
        targets: dict[int, list[int]] = {}
        for source, target in () if copies is None else copies.slots.tolist():
            targets.setdefault(source, []).append(target)
        layout = self._prefixes.layout
        return ArrivalGate(self._caches, arrivals, (layout.block, layout.state), targets)

    def fill(self) -> None:
        """There is no step to load under: load what has begun, and wait for it."""
        gate = self.gate(None)
        if gate is not None:
            self._executor.run(gate.finish).result()
            self.settle(gate)

    def settle(self, gate: ArrivalGate) -> None:
        """A forward has passed its gate: who has read wrong bytes starts again. Call before the commit."""
        for arrival in gate.arrivals:
            is_sound = arrival.failure is None
            self._core.settle_prefix(arrival.publication, is_sound)
            self.stats.num_loaded += is_sound
            self.stats.num_loaded_tokens += arrival.num_tokens * is_sound
            self.stats.num_early_layers += arrival.num_early
            self.stats.num_failed += not is_sound

    def discard(self) -> None:
        """The core has discarded everything in flight, publications with it."""
        for arrival in self._arrivals:
            arrival.load.cancel(wait=False)
        self._arrivals = []

    def keep(self) -> None:
        """Give borders that have become known to the store."""
        for tokens, blocks, slot, is_whole in self._core.take_published_borders():
            chain = self._prefixes.chain(tokens)
            border = len(blocks)
            missing = {
                index: block
                for index, block in enumerate(blocks.tolist())
                if not self.store.contains(chain.block(index).key)
            }
            is_stored = self._prefixes.has_state(chain, border, EXACT if is_whole else REPLAYED)
            if missing or not is_stored:
                self.stats.num_kept += 1
                kind = STATE if is_whole else ENCODER
                self._executor.run(self._save, chain, border, missing, 0 if is_stored else slot, kind)

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

    def _begin(self, seq_id: int) -> None:
        """Begin to load a sequence's prefix, if the store has something that helps."""
        tokens = np.concatenate([self._core.prompt_token_ids(seq_id), self._core.output_token_ids(seq_id)])
        *numbers, replay_start = self._core.find_prefix(seq_id)
        resumable, known = (num_tokens // self._block_size for num_tokens in numbers)
        most = (len(tokens) - 1) // self._block_size
        kinds = EXACT
        if replay_start > 0:  # decoder windows begin there: in front of it nobody reads them
            most, kinds = min(most, replay_start // self._block_size), REPLAYED
        if resumable >= most:
            return
        self.stats.num_lookups += 1
        chain = self._prefixes.chain(tokens)
        border = self._prefixes.find(chain, most, num_known=known, resumable=resumable, kinds=kinds)
        if border > 0 and not self._load(seq_id, chain, border, kinds):
            self.stats.num_failed += 1

    def _load(self, seq_id: int, chain: PrefixChain, border: int, kinds: tuple[str, ...]) -> bool:
        """Begin to load a prefix and publish it; False when it has no place in the pools, or has gone."""
        held = self._core.reserve_prefix(seq_id, border * self._block_size)
        if held is None:
            return False
        _, block_ids, slot = held
        layout = self._prefixes.layout
        blocks = np.zeros((len(block_ids), layout.block_bytes), np.uint8)
        state = np.zeros(layout.slot_bytes, np.uint8)
        load = self._prefixes.load(chain, border, list(blocks), state, kinds)
        if load is None:
            self._core.cancel_prefix()
            return False
        publication = self._core.publish_prefix()
        if publication == 0:
            load.cancel(wait=False)
            return False
        self._arrivals.append(
            Arrival(publication, border * self._block_size, load, block_ids, blocks, slot, state)
        )
        return True

    def _save(self, chain: PrefixChain, border: int, blocks: dict[int, int], slot: int, kind: str) -> None:
        """On the device's queue: copy blocks and a slot (0: none) to be written later."""
        rows = {index: self._caches.blocks[block].cpu().numpy() for index, block in blocks.items()}
        state = self._caches.slots[slot].cpu().numpy() if slot else None
        self._prefixes.put_later(chain, border, rows, state, kind)
