"""Ratio verification inside a step: what has to be kept of the drafts, and how the rows that test them draw.

A ratio request's drafts are drawn with noise of their own, and tested against the distribution that they were
drawn from. So the scores of every draft, after all transforms, stay on the device from the step that proposes
to the one that verifies. Sequences are found by their state slots, which they keep in between; a recomputed
sequence gets new drafts before any is tested. Requests that verify by coupled noise need none of this.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.sampling.inputs import SamplingInputs
from deepinfer.sampling.verify import ratio_verify

# Scores that a verification holds at once as float64; more rows are tested in slices.
SLICE_BYTES = 64 << 20


class DraftScores:
    """Scores that drafts were drawn from, by state slot and place in the block.

    num_slots * num_drafts * vocab_size float32 numbers, allocated when the first drafts are kept.
    """

    def __init__(self, num_slots: int, num_drafts: int, vocab_size: int, device: torch.device) -> None:
        self._shape = (num_slots, num_drafts, vocab_size)
        self._device = device
        self._table: Tensor | None = None

    @property
    def is_allocated(self) -> bool:
        return self._table is not None

    def keep(self, slots: Tensor, step: int, scores: Tensor) -> None:
        """Remember [n, V] float32 scores of draft `step` (0, 1, ...) of the sequences in n distinct slots."""
        if self._table is None:
            self._table = torch.empty(self._shape, device=self._device)
        self._table[slots.long(), step] = scores

    def take(self, slots: Tensor, places: Tensor) -> Tensor:
        """[n, V] float32 scores of drafts `places` in `slots`, [n] each; a place beyond gives any scores."""
        assert self._table is not None, "no drafts were kept"
        return self._table[slots.long(), places.clamp(max=self._shape[1] - 1).long()]


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
        size = max(1, SLICE_BYTES // (8 * target.shape[1]))
        inputs, tokens = self._inputs, []
        for scores, part in zip(target.split(size), rows.split(size)):
            draft = self._scores.take(self._slots[part], self._places[part])
            _, drawn = ratio_verify(
                scores, draft, inputs.draft_ids[part], inputs.seeds[part], inputs.token_index[part]
            )
            tokens.append(drawn)
        return torch.cat(tokens).long()
