"""Pending context: what the drafter takes in, a few steps at once while it proposes nothing.

Taking in the rows of several steps costs little more than those of one, and nobody reads them before the next
proposal.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.models.base import DraftContext, Drafter
from deepinfer.runtime.caches import Caches

MAX_STEPS = 64
MAX_ROWS = 512  # of all steps together


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

    def add(self, context: DraftContext, may_wait: bool) -> None:
        """Take in the context of the newest step; with all that waits unless it `may_wait`."""
        self._steps.append(context)
        num_rows = sum(step.positions.shape[0] for step in self._steps)
        if not may_wait or len(self._steps) >= MAX_STEPS or num_rows >= MAX_ROWS:
            self.settle()

    def settle(self) -> None:
        """Take in everything; to be called before anybody else touches state slots."""
        if not self._steps:
            return
        steps, self._steps = self._steps, []
        context = steps[0] if len(steps) == 1 else _joined(steps)
        self._drafter.store_context(context, self._caches)

    def drop(self, state_slots: Tensor) -> None:
        """Forget what belongs to these slots [n] int32: other sequences hold them now."""
        kept = []
        for step in self._steps:
            places = torch.isin(step.state_slots, state_slots, invert=True).nonzero().squeeze(1)
            if places.shape[0] == step.positions.shape[0]:
                kept.append(step)
            elif places.shape[0] > 0:
                rows = (t.index_select(0, places) for t in (step.features, step.positions, step.state_slots))
                kept.append(DraftContext(*rows, step.max_length))
        self._steps = kept

    def clear(self) -> None:
        """Forget everything."""
        self._steps.clear()


def _joined(steps: list[DraftContext]) -> DraftContext:
    return DraftContext(
        features=torch.cat([step.features for step in steps]),
        positions=torch.cat([step.positions for step in steps]),
        state_slots=torch.cat([step.state_slots for step in steps]),
        max_length=max(step.max_length for step in steps),
    )
