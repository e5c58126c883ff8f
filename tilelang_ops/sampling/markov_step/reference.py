"""Torch meaning of `markov_step`."""

from __future__ import annotations

import torch
from torch import Tensor

from tilelang_ops.sampling.draw_tokens import reference as draws
from tilelang_ops.sampling.markov_step.op import Draw


def run(
    base: Tensor,
    tokens: Tensor,
    embed: Tensor,
    head: Tensor,
    draw: Draw | None,
    keeps_logits: bool,
) -> tuple[Tensor | None, Tensor | None]:
    logits = base + embed[tokens.long()].float() @ head.float().t()
    kept = logits if keeps_logits else None
    if draw is None:
        return None, kept
    best, first = logits.max(dim=-1)
    scores = logits * draw.inv_temperature[:, None]
    drawn = draws.run(scores, draw.seeds, draw.token_index, draw.domain)
    chosen = torch.where(draw.inv_temperature == 0, first.int(), drawn)
    return torch.where(best.isfinite(), chosen, 0), kept
