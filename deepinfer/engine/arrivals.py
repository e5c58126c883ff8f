"""Arrivals: prefixes on their way from a KV store into the pools, layer by layer under a forward.

A loader thread fills host memory layer after layer. The forward of the step that follows passes a gate before
each layer: what that layer reads is waited for and copied into the pools there, on the device's queue, so the
bytes of later layers are read while earlier layers run.

    loader    | layer 0 | layer 1 | layer 2 | layer 3 | ...
    forward       wait  | copy 0, run layer 0 | copy 1, run layer 1 | ...

Bytes that turn out wrong are replaced by zeros, and the forward goes on: rows of other sequences do not see
them, and those that do are computed again (`PrefixExchange.settle`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from deepinfer.kv_transfer.entry import DamagedEntryError, EntrySection
from deepinfer.kv_transfer.prefix import PrefixLoad
from deepinfer.kv_transfer.store import logger
from deepinfer.runtime.caches import Caches


@dataclass
class Arrival:
    """A prefix on its way: blocks of the pool behind those that the cache knows, and the state behind them.

    Attributes:
        publication: its number in the core.
        num_tokens: of the whole prefix.
        load: reads it.
        block_ids: int32 [n] in the pool, for
        blocks: uint8 [n, block_bytes] in host memory.
        slot: in the pool, for
        state: uint8 [slot_bytes] in host memory.
        failure: why its bytes are wrong; None as long as they are not.
        num_early: layers that were in the pools before the last one had been read.
    """

    publication: int
    num_tokens: int
    load: PrefixLoad
    block_ids: np.ndarray
    blocks: np.ndarray
    slot: int
    state: np.ndarray
    failure: Exception | None = None
    num_early: int = 0
    _num_done: int = field(default=0, repr=False)

    @property
    def num_bytes(self) -> int:
        """Of host memory."""
        return self.blocks.nbytes + self.state.nbytes

    def next_layer(self, up_to: int | None) -> int | None:
        """Wait for the next layer, at most `up_to`; None when there is none."""
        layers = self.load.layers
        if self._num_done == len(layers) or (up_to is not None and layers[self._num_done] > up_to):
            return None
        layer = layers[self._num_done]
        self._num_done += 1
        if self.failure is None:
            try:
                self.load.future(layer).result()
                self.num_early += not self.load.future(layers[-1]).done()
            except Exception as error:
                if not isinstance(error, DamagedEntryError):  # another program's store
                    logger.exception("KV store: a prefix was not loaded")
                self.failure = error
                self.blocks[:] = 0
                self.state[:] = 0
        return layer


class ArrivalGate:
    """The gate of one forward; a `LayerGate`. Called on the device's queue.

    Args:
        caches: the pools.
        arrivals: what comes through it.
        sections: of blocks and of slots, by the layer that reads them.
        targets: slots that the step copies from an arrival's slot before its forward.
    """

    def __init__(
        self,
        caches: Caches,
        arrivals: Sequence[Arrival],
        sections: tuple[Sequence[EntrySection], Sequence[EntrySection]],
        targets: dict[int, list[int]],
    ) -> None:
        self.arrivals = tuple(arrivals)
        self._caches = caches
        self._sections = sections
        self._slots = [[each.slot, *targets.get(each.slot, ())] for each in arrivals]

    def wait(self, layer_id: int) -> None:
        """Bring in what this layer and those below it read."""
        self._bring(layer_id)

    def finish(self) -> None:
        """Bring in the rest."""
        self._bring(None)

    def _bring(self, up_to: int | None) -> None:
        for arrival, slots in zip(self.arrivals, self._slots):
            while (layer := arrival.next_layer(up_to)) is not None:
                self._copy(arrival, slots, layer)

    def _copy(self, arrival: Arrival, slots: list[int], layer: int) -> None:
        blocks, states = self._caches.blocks, self._caches.slots
        of_block, of_slot = self._sections
        for section in of_block if len(arrival.block_ids) else ():
            if section.layer_id == layer:
                span = slice(section.offset, section.offset + section.num_bytes)
                rows = torch.from_numpy(arrival.blocks[:, span]).to(blocks.device)
                blocks[torch.from_numpy(arrival.block_ids).long(), span] = rows
        for section in of_slot:
            if section.layer_id == layer:
                span = slice(section.offset, section.offset + section.num_bytes)
                states[slots, span] = torch.from_numpy(arrival.state[span]).to(states.device)
