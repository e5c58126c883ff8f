"""Torch meaning of `sum_smaller_probs`."""

from __future__ import annotations

import torch
from torch import Tensor


def run(logprobs: Tensor, token_ids: Tensor) -> Tensor:
    own = logprobs.gather(-1, token_ids.clamp(min=0).long()[:, None])
    total = torch.where(logprobs <= own, logprobs.exp(), 0).sum(-1, dtype=torch.float64)
    return torch.where(token_ids >= 0, total, 0).float()
