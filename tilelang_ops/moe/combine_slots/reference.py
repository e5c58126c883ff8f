"""Torch meaning of `combine_slots`."""

from __future__ import annotations

import torch
from torch import Tensor


def run(
    outputs: Tensor, places: Tensor, weights: Tensor | None, shared: Tensor | None, dtype: torch.dtype
) -> Tensor:
    total = torch.zeros(places.shape[0], outputs.shape[1], device=outputs.device)
    for slot in range(places.shape[1]):
        place = places[:, slot].long()
        part = outputs[place.clamp(min=0)].float()
        if weights is not None:
            part = part * weights[:, slot : slot + 1]
        total = torch.where((place >= 0).unsqueeze(1), total + part, total)
    return (total if shared is None else total + shared.float()).to(dtype)
