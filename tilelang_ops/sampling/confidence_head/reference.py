"""Torch meaning of `confidence_head`."""

from __future__ import annotations

import torch
from torch import Tensor

from tilelang_ops.common.numerics import sigmoid


def run(
    hidden: Tensor, markov_rows: Tensor, weight: Tensor, temperatures: Tensor, offsets: Tensor, bound: float
) -> tuple[Tensor, Tensor]:
    logits = (torch.cat([hidden, markov_rows], -1).float() @ weight.float()).t().contiguous()
    return logits, sigmoid((logits / temperatures + offsets).clamp(-bound, bound))
