"""Ratio verification inside a step: what has to be kept of the drafts, and how the rows that test them draw.

A ratio request's drafts are drawn with noise of their own, and tested against the distribution that they were
drawn from. So the scores of every draft, after all transforms, stay on the device from the step that proposes
to the one that verifies. Sequences are found by their state slots, which they keep in between; a recomputed
sequence gets new drafts before any is tested. Requests that verify by coupled noise need none of this.

There are more slots than sequences that run, because the prefix cache keeps its snapshots in the others, and
scores are large. So a slot gets a row of the table only while a sequence with drafts holds it.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from deepinfer.sampling.inputs import SamplingInputs
from deepinfer.sampling.verify import ratio_verify
from deepinfer.utils.upload import upload

# Scores that a verification on the CPU holds at once as float64; more rows are tested in slices.
SLICE_BYTES = 64 << 20


class DraftScores:
    """Scores that drafts were drawn from, by state slot and place in the block.

    num_rows * num_drafts * vocab_size float32 numbers, allocated when the first drafts are kept. More slots
    in use than rows make it grow.

    Args:
        num_slots: of the state pool.
        num_drafts, vocab_size: of a sequence.
        num_rows: slots that are expected to have drafts at once.
    """

    def __init__(
        self, num_slots: int, num_drafts: int, vocab_size: int, device: torch.device, num_rows: int
    ) -> None:
        self._shape = (num_rows, num_drafts, vocab_size)
        self._device = device
        self._table: Tensor | None = None
        self._row_of: dict[int, int] = {}  # by slot
        self._free = list(range(num_rows - 1, -1, -1))
        self._rows = torch.zeros(num_slots, dtype=torch.int64, device=device)  # the same, 0 for slots without

    @property
    def is_allocated(self) -> bool:
        return self._table is not None

    @property
    def num_rows(self) -> int:
        return self._shape[0]

    def release(self, slots: Iterable[int]) -> None:
        """No sequence holds these slots: their rows come free."""
        for slot in self._row_of.keys() & set(slots):
            self._free.append(self._row_of.pop(slot))

    def assign(self, slots: Iterable[int]) -> None:
        """Give rows to the slots of a step that keeps or takes their scores; who has one keeps it."""
        new = [slot for slot in slots if slot not in self._row_of]
        if len(new) > len(self._free):
            self._grow(len(new) - len(self._free))
        for slot in new:
            self._row_of[slot] = self._free.pop()
        if new:
            rows = [self._row_of[slot] for slot in new]
            index, values = upload([np.array(new), np.array(rows)], self._rows.device)
            self._rows[index] = values

    def keep(self, slots: Tensor, step: int, scores: Tensor) -> None:
        """Remember [n, V] float32 scores of draft `step` (0, 1, ...) of the sequences in n distinct slots."""
        if self._table is None:
            self._table = torch.empty(self._shape, device=self._device)
        self._table[self._rows[slots.long()], step] = scores

    def find(self, slots: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        """Where the scores of drafts `places` in `slots`, [n] each, are: no copy.

        Returns:
            [N, V] float32 scores, and [n] int64 rows of them; a place beyond gives any row.
        """
        assert self._table is not None, "no drafts were kept"
        num_drafts = self._shape[1]
        rows = self._rows[slots.long()] * num_drafts + places.clamp(max=num_drafts - 1)
        return self._table.flatten(0, 1), rows

    def take(self, slots: Tensor, places: Tensor) -> Tensor:
        """[n, V] float32, a copy of what `find` finds."""
        table, rows = self.find(slots, places)
        return table[rows]

    def _grow(self, count: int) -> None:
        num_rows = self.num_rows
        self._free += range(num_rows, num_rows + count)
        self._shape = (num_rows + count, *self._shape[1:])
        if self._table is not None:
            table = torch.empty(self._shape, device=self._device)
            table[:num_rows] = self._table
            self._table = table


class RatioVerifier:
    """Draws the rows of ratio requests in a decode step; the `draw_ratio` of `Sampler.sample`.

    A row whose draft passes emits the draft, another one a token from the residual, and one without a draft a
    fresh one. So, as in coupled verification, exactly the drafts that equal their row's token stand. (Where a
    residual is empty a refused draft may be drawn again; it stands then as well. Its successors were drawn
    behind this very token, and nothing that decided about it decides about them.)

    Args:
        scores: what the drafts were drawn from.
        inputs: parameters of R rows.
        slots: [R] state slot of each row's sequence.
        places: [R] which draft of its sequence a row tests, 0 the first.
    """

    def __init__(self, scores: DraftScores, inputs: SamplingInputs, slots: Tensor, places: Tensor) -> None:
        self._scores = scores
        self._inputs = inputs
        self._slots = slots
        self._places = places

    def slice(self, start: int, stop: int) -> RatioVerifier:
        """For the rows start ... stop - 1, renumbered from 0."""
        part = slice(start, stop)
        return RatioVerifier(
            self._scores, self._inputs.slice(start, stop), self._slots[part], self._places[part]
        )

    def __call__(self, target: Tensor, rows: Tensor) -> Tensor:
        """[C, V] float32 scores of the rows `rows` [C] int64 -> [C] int64 tokens."""
        size = max(1, SLICE_BYTES // (8 * target.shape[1])) if target.device.type == "cpu" else len(target)
        inputs, tokens = self._inputs, []
        for scores, part in zip(target.split(size), rows.split(size)):
            draft, draft_rows = self._scores.find(self._slots[part], self._places[part])
            own = inputs.draft_ids[part], inputs.seeds[part], inputs.token_index[part]
            _, drawn = ratio_verify(scores, draft, *own, draft_rows)
            tokens.append(drawn)
        return torch.cat(tokens).long()
