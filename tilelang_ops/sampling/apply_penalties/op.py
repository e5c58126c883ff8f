"""Repetition, frequency and presence penalties of tokens that a row has seen."""

from __future__ import annotations

import torch
from torch import Tensor

from tilelang_ops.common.dispatch import backend


def apply_penalties(
    logits: Tensor,
    rows: Tensor,
    tokens: Tensor,
    counts: Tensor,
    repetition: Tensor,
    frequency: Tensor,
    presence: Tensor,
) -> None:
    """Penalises the logits of pairs (row, token), in place; the bits are the same on every device.

    A positive logit is divided by the repetition penalty, another one multiplied; then frequency * count is
    taken off, and presence where count > 0.

    Args:
        logits: [R, V] float32, rows contiguous.
        rows, tokens: [H] int32; pairs are unique.
        counts: [H] int32, occurrences in the output; 0 = in the prompt only.
        repetition, frequency, presence: [R] float32.
    """
    assert logits.dtype == torch.float32 and logits.stride(1) == 1, f"{logits.dtype=} {logits.stride()=}"
    assert rows.shape == tokens.shape == counts.shape, f"{rows.shape=} {tokens.shape=} {counts.shape=}"
    assert rows.dtype == tokens.dtype == counts.dtype == torch.int32, f"{rows.dtype=} {counts.dtype=}"
    assert repetition.shape == frequency.shape == presence.shape == logits.shape[:1], f"{repetition.shape=}"
    if rows.shape[0] > 0:
        run = backend(__package__, logits.device).run
        run(logits, rows, tokens, counts, repetition, frequency, presence)
