"""Torch meaning of `keep_listed`."""

from __future__ import annotations

import torch
from torch import Tensor


def run(logits: Tensor, rows: Tensor, offsets: Tensor, tokens: Tensor) -> None:
    forbidden = torch.ones(rows.shape[0], logits.shape[1], dtype=torch.bool, device=logits.device)
    owner = torch.repeat_interleave(offsets.diff().long(), output_size=tokens.shape[0])
    forbidden[owner, tokens.long()] = False
    rows = rows.long()
    logits[rows] = logits[rows].masked_fill(forbidden, -torch.inf)
