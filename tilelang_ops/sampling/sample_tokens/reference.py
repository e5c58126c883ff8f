"""Torch meaning of `sample_tokens`."""

from __future__ import annotations

import torch
from torch import Tensor

from tilelang_ops.sampling.draw_tokens import reference as draw
from tilelang_ops.sampling.truncate_scores import reference as truncation


def run(
    logits: Tensor,
    inv_temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    token_index: Tensor,
    domain: int,
) -> tuple[Tensor, Tensor]:
    is_greedy = inv_temperature == 0
    scores = logits * torch.where(is_greedy, 1.0, inv_temperature)[:, None]
    kept = truncation.run(scores, top_k, top_p, min_p, torch.empty_like(scores))
    drawn = draw.run(kept, seeds, token_index, domain)
    best, first = logits.max(dim=-1)
    token_ids = torch.where(is_greedy, first.int(), drawn)
    return torch.where(best.isfinite(), token_ids, 0), best
