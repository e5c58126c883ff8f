"""Torch meaning of `apply_token_bitmask`."""

from __future__ import annotations

import torch
from torch import Tensor

# Rows whose bits are spread at once, a byte for each.
ROWS_AT_ONCE = 64


def run(logits: Tensor, bitmask: Tensor, rows: Tensor) -> None:
    place = torch.arange(8, dtype=torch.uint8, device=logits.device)
    for words, part in zip(bitmask.split(ROWS_AT_ONCE), rows.long().split(ROWS_AT_ONCE)):
        # The bytes of a word stand lowest first, on every host that torch runs on.
        bits = (words.view(torch.uint8)[:, :, None] >> place) & 1
        forbidden = bits.flatten(1)[:, : logits.shape[1]] == 0
        logits[part] = logits[part].masked_fill(forbidden, -torch.inf)
