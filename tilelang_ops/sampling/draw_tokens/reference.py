"""Torch meaning of `draw_tokens`: the noise of every token, one addition, the first maximum."""

from __future__ import annotations

import torch
from torch import Tensor

from tilelang_ops.common.noise import gumbel, row_words

# Tokens whose noise is computed at once, to bound the memory.
TOKENS_AT_ONCE = 1 << 24


def run(scores: Tensor, seeds: Tensor, token_index: Tensor, domain: int) -> Tensor:
    step = max(1, TOKENS_AT_ONCE // scores.shape[1])
    parts = zip(scores.split(step), seeds.split(step), token_index.split(step))
    token_ids = []
    for part, seed, index in parts:
        best, token = (part + gumbel(row_words(seed, index, scores.shape[1], domain))).max(-1)
        token_ids.append(torch.where(best.isfinite(), token, 0).int())
    return torch.cat(token_ids)
