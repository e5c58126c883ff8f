"""Drafts: the sampling parameters under which a drafter chooses its tokens.

A draft of a coupled request is accepted when it equals the token that the target draws at the same index, so
it is drawn with the same transforms and the same noise. That of a ratio request is drawn with noise of its
own, and the scores that it was drawn from are kept for its test. What depends on tokens that this step itself
emits (penalty history, the minimum length) is taken as of the sequence's first row: a draft may be worse,
never wrong, and nothing has to be read back from the device.
"""

from __future__ import annotations

import dataclasses
from typing import Protocol

import numpy as np
from torch import Tensor

from deepinfer.sampling.draw import gumbel_argmax
from deepinfer.sampling.inputs import SamplingInputs, TokenMasks
from deepinfer.sampling.philox import draft_domain
from deepinfer.sampling.ratio import DraftScores
from deepinfer.sampling.sampler import RowParameters, Sampler
from deepinfer.utils.upload import upload_one
from tilelang_ops.step_inputs import DraftRows


class DraftGrammars(Protocol):
    """What the grammars of some of the n sequences say about their drafts."""

    def masks(self, step: int) -> TokenMasks | None:
        """Of draft `step`, once the drafts before it are chosen."""

    def chose(self, step: int, tokens: Tensor) -> None:
        """[n] int32: what was chosen."""


class DraftChooser:
    """Chooses the tokens of each draft step for n sequences; the `choose` of a drafter's `propose`.

    Args:
        sampler: the engine's.
        inputs: the step's parameters.
        first_rows: [n] int64 on the host, ascending: first sampling row of each sequence that drafts.
        anchor_index: [n] int64 on the device: absolute index of the token that each sequence chose last.
        slots: [n] state slots, by which
        scores: keeps what ratio requests' drafts are drawn from; None when there is no such request.
        grammars: of requests with structured output; None when there is no such request.
    """

    def __init__(
        self,
        sampler: Sampler,
        inputs: SamplingInputs,
        first_rows: np.ndarray,
        anchor_index: Tensor,
        slots: Tensor,
        scores: DraftScores | None,
        grammars: DraftGrammars | None = None,
    ) -> None:
        self._sampler = sampler
        self._inputs = _first_rows_only(inputs, first_rows)
        self._anchor_index = anchor_index
        self._slots = slots
        self._scores = scores
        self._grammars = grammars

    def __call__(self, step: int, logits: Tensor) -> Tensor:
        """[n, V] float32 logits of draft `step` (0, 1, ...) -> [n] int32 tokens."""
        inputs = dataclasses.replace(self._inputs, token_index=self._anchor_index + (1 + step))
        if self._grammars is None:
            return self._choose(step, logits, inputs)
        inputs = inputs.with_masks(self._grammars.masks(step))
        tokens = self._choose(step, logits, inputs)
        self._grammars.chose(step, tokens)
        return tokens

    def _choose(self, step: int, logits: Tensor, inputs: SamplingInputs) -> Tensor:
        if self._scores is None:
            return self._sampler.sample(logits, inputs).token_ids

        def draw_ratio(scores: Tensor, rows: Tensor) -> Tensor:
            self._scores.keep(self._slots[rows], step, scores)
            return gumbel_argmax(scores, inputs.seeds[rows], inputs.token_index[rows], draft_domain(step))

        return self._sampler.sample(logits, inputs, draw_ratio).token_ids


class PlainDrafts:
    """Chooses the tokens of each draft step as `DraftChooser`, for sequences that ask for nothing else.

    Nothing is decided on the host and no shape depends on values, so it can be part of a captured graph.

    Args:
        sampler: the engine's.
        rows: of the n sequences.
    """

    def __init__(self, sampler: Sampler, rows: DraftRows) -> None:
        self._sampler = sampler
        self._rows = rows

    def __call__(self, step: int, logits: Tensor) -> Tensor:
        """[n, V] float32 logits of draft `step` (0, 1, ...) -> [n] int32 tokens."""
        rows = self._rows
        parameters = rows.inv_temperature, rows.top_k, rows.top_p, rows.min_p, rows.seeds
        return self._sampler.draft(logits, RowParameters(*parameters, rows.token_index[step]))


def _first_rows_only(inputs: SamplingInputs, rows: np.ndarray) -> SamplingInputs:
    """The given rows, renumbered from 0, that ask for nothing but a token."""
    taken = inputs.take(rows)
    count = rows.shape[0]
    minus_one = np.full(count, -1, dtype=np.int32)
    neutral = {"num_logprobs": minus_one, "forced": minus_one, "draft_ids": minus_one}
    device = {name: upload_one(value, inputs.device) for name, value in neutral.items()}
    return dataclasses.replace(taken, **device, host={**taken.host, **neutral})
