"""Torch meaning of `gather_logprobs`: whole rows are sorted."""

from __future__ import annotations

import torch
from torch import Tensor


def run(
    scores: Tensor, token_ids: Tensor, num_top: int, floor: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    scores = scores + 0.0  # one zero of both
    values, order = torch.sort(scores, dim=-1, descending=True, stable=True)
    chosen = scores.gather(-1, token_ids[:, None])
    ids = torch.arange(scores.shape[1], device=scores.device)
    is_before = (scores > chosen) | ((scores == chosen) & (ids < token_ids[:, None]))
    top = scores.amax(dim=-1, keepdim=True)
    log_total = torch.exp(scores - top).sum(dim=-1, keepdim=True, dtype=torch.float64).log() + top.double()

    def normalise(part: Tensor) -> Tensor:
        logprobs = (part.double() - log_total).float()
        return logprobs.nan_to_num(nan=floor, neginf=floor).clamp_(floor, 0.0)

    return (
        normalise(chosen).squeeze(-1),
        (1 + is_before.sum(-1)).int(),
        order[:, :num_top].int().contiguous(),
        normalise(values[:, :num_top]),
    )
