"""Torch meaning of `ban_tokens`."""

from __future__ import annotations

import torch
from torch import Tensor


def run(logits: Tensor, token_ids: Tensor) -> Tensor:
    ids = token_ids.long()
    largest = logits.index_select(1, ids).amax(dim=-1)
    logits.index_fill_(1, ids, -torch.inf)
    return largest
