"""Torch meaning of `gate_streams`."""

from __future__ import annotations

import torch
from torch import Tensor

from tilelang_ops.common.numerics import sigmoid

MIN_DOT = 1e-6  # floor under the root


def run(
    streams: Tensor, key_value: Tensor, weight: Tensor, eps: float, passes: Tensor | None = None
) -> Tensor:
    num_streams, width = weight.shape
    keys, value = key_value.float().split([num_streams * width, width], dim=1)
    keys = keys.unflatten(1, (num_streams, width)).contiguous()
    old = streams.float()
    norms = torch.sqrt(old.square().mean(-1) + eps) * torch.sqrt(keys.square().mean(-1) + eps)
    dot = (old * weight * keys).sum(-1) / norms * width**-0.5
    gate = sigmoid(torch.copysign(torch.sqrt(dot.abs().clamp_min(MIN_DOT)), dot))
    new = (old + gate.unsqueeze(-1) * value.unsqueeze(1)).to(streams.dtype)
    return new if passes is None else torch.where(passes.view(-1, 1, 1), streams, new)
