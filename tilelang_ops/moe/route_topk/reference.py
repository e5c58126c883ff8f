"""Torch meaning of `route_topk`."""

from __future__ import annotations

import torch
from torch import Tensor

from tilelang_ops.common.numerics import softplus

WEIGHT_EPS = 1e-20  # keeps the weights finite when every chosen score is zero


def run(
    logits: Tensor,
    bias: Tensor,
    num_selected: int,
    scale: float,
    image_bias: Tensor | None,
    is_image: Tensor | None,
) -> tuple[Tensor, Tensor]:
    scores = torch.sqrt(softplus(logits))
    if is_image is not None:
        bias = torch.where(is_image.unsqueeze(1), image_bias, bias)
    # A stable sort, because topk leaves open which of two equal values comes first.
    order = torch.sort(scores + bias, dim=1, descending=True, stable=True).indices
    chosen = order[:, :num_selected].contiguous()
    weights = scores.gather(1, chosen)
    return chosen.int(), weights / (weights.sum(1, keepdim=True) + WEIGHT_EPS) * scale
