"""Torch meaning of `rms_norm`."""

from __future__ import annotations

import torch
from torch import Tensor


def run(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    inverse = 1.0 / torch.sqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * inverse * weight).to(x.dtype).contiguous()
