"""Torch meaning of `hash_ngrams`."""

from __future__ import annotations

import torch
from torch import Tensor


def run(ngram_ids: Tensor, multipliers: Tensor, primes: Tensor, offsets: Tensor) -> Tensor:
    num_tables, max_ngram = multipliers.shape
    terms = ngram_ids.long() * multipliers.unsqueeze(1)  # [tables, n, max_ngram]
    roll, rolls = terms[..., 0], []
    for back in range(1, max_ngram):
        roll = roll ^ terms[..., back]
        rolls.append(roll)
    by_size = torch.stack(rolls, -1).unsqueeze(-1)  # [tables, n, sizes, 1]
    heads = (num_tables, 1, max_ngram - 1, -1)
    rows = by_size % primes.view(heads) + offsets.view(heads)
    return rows.flatten(2).int()
