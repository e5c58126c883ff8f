"""Torch meaning of `apply_penalties`."""

from __future__ import annotations

import torch
from torch import Tensor


def run(
    logits: Tensor,
    rows: Tensor,
    tokens: Tensor,
    counts: Tensor,
    repetition: Tensor,
    frequency: Tensor,
    presence: Tensor,
) -> None:
    rows, tokens = rows.long(), tokens.long()
    values = logits[rows, tokens]
    factor = repetition[rows]
    values = torch.where(values > 0, values / factor, values * factor)
    values = values - frequency[rows] * counts
    values = values - presence[rows] * (counts > 0)
    logits[rows, tokens] = values
