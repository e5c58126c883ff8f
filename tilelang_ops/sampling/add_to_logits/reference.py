"""Torch meaning of `add_to_logits`."""

from __future__ import annotations

import torch
from torch import Tensor


def run(logits: Tensor, rows: Tensor, tokens: Tensor, values: Tensor | None) -> None:
    place = rows.long(), tokens.long()
    logits[place] = -torch.inf if values is None else logits[place] + values
