"""Pending context: what the drafter takes in, put off while it proposes nothing.

Nobody reads a sequence's context before its next proposal, and that sees the newest `context_size` positions
only. So what is put off for long, or belongs to a sequence that has ended, is never taken in at all.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from deepinfer.models.base import DraftContext, Drafter
from deepinfer.runtime.caches import Caches

MAX_BYTES = 64 << 20  # of features that wait
MAX_ROWS = 512  # that a CPU takes in at once: more gain nothing, and take memory
NOBODY = -1  # owner of a row that waits no more


class PendingContext:
    """Context that the drafter has not taken in yet, each row with the state slot that it is for.

    Rows of a slot never meet in a position. That is the caller's part: a step that tests drafts leaves
    positions that the next one writes again, so its rows are to be taken in before that; and before a slot
    changes hands what waits for it is to be dropped, or taken in.

    Args:
        drafter: takes it in.
        caches: where to.
    """

    def __init__(self, drafter: Drafter, caches: Caches) -> None:
        self._drafter = drafter
        self._caches = caches
        self.clear()

    @property
    def is_empty(self) -> bool:
        """Whether nothing waits."""
        return self._size == 0

    def clear(self) -> None:
        """Forget everything."""
        self._waiting: DraftContext | None = None  # its first `_size` rows; the others are room
        self._size = 0

    def take_in(self, context: DraftContext) -> None:
        """Take in the context of a step, behind what waits for the same sequences."""
        self.settle(context.state_slots)
        self._store(context)

    def put_off(self, context: DraftContext) -> None:
        """Let the context of a step wait, as far as there is room."""
        count = context.positions.shape[0]
        if count == 0:
            return
        if self._size + count > self._room:
            self._make_room(context)
        if count > self._room:
            self._store(context)
            return
        self._write(context)

    def settle(self, state_slots: Tensor | None = None) -> None:
        """Take in what a proposal will see, to be called before anybody else touches these slots.

        Args:
            state_slots: [n] int32; None for all.
        """
        if self._size == 0 or (state_slots is not None and state_slots.shape[0] == 0):
            return
        owned = self._owned(state_slots)
        context = self._rows(self._seen(owned))
        self._forget(owned, state_slots is None)
        if context.positions.shape[0] > 0:
            self._store(context)

    def drop(self, state_slots: Tensor) -> None:
        """Forget what waits for these slots [n] int32: other sequences hold them now."""
        if self._size > 0 and state_slots.shape[0] > 0:
            self._forget(self._owned(state_slots), False)

    def _store(self, context: DraftContext) -> None:
        store(self._drafter, context, self._caches)

    def _owned(self, state_slots: Tensor | None) -> Tensor:
        """[size] bool: rows that wait for these slots."""
        owners = self._waiting.state_slots[: self._size].long()
        if state_slots is None:
            return owners != NOBODY
        wanted = state_slots.long()
        # One place more, for nobody: it is the last one.
        size = int(max(owners.max(), wanted.max())) + 2
        is_wanted = torch.zeros(size, dtype=torch.bool, device=owners.device)
        is_wanted[wanted] = True
        return is_wanted[owners]

    def _seen(self, owned: Tensor) -> Tensor:
        """[n] int64: those of the owned rows that the next proposals of their sequences see."""
        rows = owned.nonzero().squeeze(1)
        if rows.shape[0] == 0:
            return rows
        owners = self._waiting.state_slots[rows].long()
        positions = self._waiting.positions[rows]
        newest = positions.new_full((int(owners.max()) + 1,), -1)
        newest.scatter_reduce_(0, owners, positions, "amax")
        return rows[positions > newest[owners] - self._drafter.context_size]

    def _rows(self, rows: Tensor) -> DraftContext:
        waiting = self._waiting
        part = waiting.features[rows], waiting.positions[rows], waiting.state_slots[rows]
        return DraftContext(*part, waiting.max_length)

    def _forget(self, owned: Tensor, is_all: bool) -> None:
        if is_all:
            self.clear()
        else:
            self._waiting.state_slots[: self._size][owned] = NOBODY

    @property
    def _room(self) -> int:
        return 0 if self._waiting is None else self._waiting.positions.shape[0]

    def _make_room(self, context: DraftContext) -> None:
        """Let what nobody will see wait no more; then move to more room, if there was little, or settle."""
        count = context.positions.shape[0]
        most = MAX_BYTES // (context.features.nbytes // count)
        kept = None
        if self._size > 0:
            kept = self._rows(self._seen(self._owned(None)))
            self._size = kept.positions.shape[0]
        size = self._size + count
        if size > max(most // 2, 1):
            if kept is not None:
                self._store(kept)
            self.clear()
            kept, size = None, count
        if 2 * size > self._room:
            room = min(most, max(3 * size, MAX_ROWS))
            names = context.features, context.positions, context.state_slots
            parts = (part.new_empty(room, *part.shape[1:]) for part in names)
            self._waiting = DraftContext(*parts, 0 if kept is None else kept.max_length)
        self._size = 0
        if kept is not None:
            self._write(kept)

    def _write(self, context: DraftContext) -> None:
        """Behind what waits; there is room."""
        waiting, places = self._waiting, slice(self._size, self._size + context.positions.shape[0])
        waiting.features[places] = context.features
        waiting.positions[places] = context.positions
        waiting.state_slots[places] = context.state_slots
        self._size = places.stop
        if context.max_length > waiting.max_length:
            self._waiting = dataclasses.replace(waiting, max_length=context.max_length)


class DirectContext:
    """The same for a device that works through a queue: everything is taken in at once.

    What can wait there is found by looking at values, for which the host would have to wait, and the work
    that it saves is little.
    """

    is_empty = True

    def __init__(self, drafter: Drafter, caches: Caches) -> None:
        self._drafter = drafter
        self._caches = caches

    def take_in(self, context: DraftContext) -> None:
        """Take in the context of a step."""
        store(self._drafter, context, self._caches)

    def settle(self, state_slots: Tensor | None = None) -> None:
        """Nothing waits."""

    def clear(self) -> None:
        """Nothing waits."""


def store(drafter: Drafter, context: DraftContext, caches: Caches) -> None:
    """Let the drafter take in context; a CPU some rows at a time, a GPU all, which reads the weights once."""
    num_rows = max(1, context.positions.shape[0])
    step = MAX_ROWS if context.features.is_cpu else num_rows
    for start in range(0, num_rows, step):
        rows = slice(start, start + step)
        part = context.features[rows], context.positions[rows], context.state_slots[rows]
        drafter.store_context(DraftContext(*part, context.max_length), caches)
