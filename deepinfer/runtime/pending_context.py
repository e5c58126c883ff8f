"""Pending context: what the drafter takes in, put off while it proposes nothing.

Nobody reads context before the next proposal, and that sees the newest `context_size` positions of a sequence
only. So what is put off for long, or belongs to a sequence that has ended, is never taken in at all.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.models.base import DraftContext, Drafter
from deepinfer.runtime.caches import Caches

MAX_BYTES = 64 << 20  # of features that wait
MAX_ROWS = 512  # that are taken in at once: more gain nothing, and take memory


class PendingContext:
    """Context that the drafter has not taken in yet, of steps with one row for each sequence.

    Rows of such steps never meet in a position: a step that tested drafts leaves positions that the next one
    writes again, and is taken in at once.

    Args:
        drafter: takes it in.
        caches: where to.
    """

    def __init__(self, drafter: Drafter, caches: Caches) -> None:
        self._drafter = drafter
        self._caches = caches
        self._steps: list[DraftContext] = []
        self._num_bytes = 0  # of features, at most: what is dropped counts until the next clean-up

    def add(self, context: DraftContext, may_wait: bool) -> None:
        """Take in the context of the newest step; with all that waits unless it `may_wait`."""
        self._steps.append(context)
        self._num_bytes += context.features.nbytes
        if not may_wait:
            self.settle()
        elif len(self._steps) > 2 * self._drafter.context_size or self._num_bytes > MAX_BYTES:
            newest = self._newest()
            self._steps, self._num_bytes = [newest], newest.features.nbytes
            if self._num_bytes > MAX_BYTES // 2:
                self.settle()

    def settle(self) -> None:
        """Take in what will be read; to be called before anybody else touches state slots."""
        if not self._steps:
            return
        context = self._steps[0] if len(self._steps) == 1 else self._newest()
        self.clear()
        for start in range(0, max(1, context.positions.shape[0]), MAX_ROWS):
            self._drafter.store_context(_rows(context, slice(start, start + MAX_ROWS)), self._caches)

    def drop(self, state_slots: Tensor) -> None:
        """Forget what belongs to these slots [n] int32: other sequences hold them now."""
        kept = []
        for step in self._steps:
            stays = torch.isin(step.state_slots, state_slots, invert=True)
            if stays.all():
                kept.append(step)
            elif stays.any():
                kept.append(_rows(step, stays.nonzero().squeeze(1)))
        self._steps = kept

    def clear(self) -> None:
        """Forget everything."""
        self._steps, self._num_bytes = [], 0

    def _newest(self) -> DraftContext:
        """All steps as one, without the rows that a proposal would not see."""
        steps = self._steps
        context = DraftContext(
            features=torch.cat([step.features for step in steps]),
            positions=torch.cat([step.positions for step in steps]),
            state_slots=torch.cat([step.state_slots for step in steps]),
            max_length=max(step.max_length for step in steps),
        )
        slots = context.state_slots.long()
        newest = context.positions.new_full((int(slots.max()) + 1,), -1)
        newest.scatter_reduce_(0, slots, context.positions, "amax")
        seen = context.positions > newest[slots] - self._drafter.context_size
        return _rows(context, seen.nonzero().squeeze(1))


def _rows(context: DraftContext, rows: Tensor | slice) -> DraftContext:
    return DraftContext(
        context.features[rows], context.positions[rows], context.state_slots[rows], context.max_length
    )
