"""A step's drafts and confidences, a row for every sequence, from what the drafter proposed for some."""

from __future__ import annotations

import torch
from torch import Tensor

from tilelang_ops.common.dispatch import backend

MAX_LOGIT = 60.0
NO_DRAFTS = -1  # in place of the tokens of sequences that drafts are not asked for


def finish_drafts(
    tokens: Tensor,
    logits: Tensor,
    temperatures: Tensor,
    offsets: Tensor,
    eos_token_id: int,
    out: tuple[Tensor, Tensor, Tensor],
    places: Tensor | None = None,
    first: int = 0,
) -> None:
    """confidence = sigmoid(clamp(logit / temperature + offset, -60, 60)), 0 behind the text's end.

    Args:
        tokens: [k, n] int32 drafts of n sequences.
        logits: [n, k] float32 of the confidences.
        temperatures, offsets: [k] float32.
        eos_token_id: the draft that ends the text.
        out: drafts [S, k] int32, confidences and their logits [S, k] float32, all written.
        places: [S] int32 each sequence's number among the n, -1 where nothing is proposed: then all is 0.
            None for the numbers 0, 1, ... from sequence `first` on.
        first: sequences before it have `NO_DRAFTS` and confidences of 0.
    """
    k, n = tokens.shape
    drafts, *floats = out
    num_seqs = drafts.shape[0]
    assert logits.shape == (n, k) and temperatures.shape == offsets.shape == (k,), f"{logits.shape=} {k=}"
    assert all(part.shape == (num_seqs, k) and part.is_contiguous() for part in out), f"{drafts.shape=}"
    assert places is not None or num_seqs == first + n, f"{num_seqs=} {first=} {n=}"
    assert tokens.dtype == drafts.dtype == torch.int32, f"{tokens.dtype=}"
    if num_seqs > 0:
        run = backend(__package__, drafts.device).run
        run(tokens, logits, temperatures, offsets, eos_token_id, drafts, *floats, places, first)
