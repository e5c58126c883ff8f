"""Torch meaning of `group_rows`."""

from __future__ import annotations

import torch
from torch import Tensor

from tilelang_ops.moe.group_rows.op import GroupedRows, capacity


def run(ids: Tensor, num_experts: int, tile: int) -> GroupedRows:
    flat = ids.flatten().long()
    is_kept = (flat >= 0) & (flat < num_experts)
    kept = is_kept.nonzero().squeeze(1)
    order = kept[torch.argsort(flat[kept], stable=True)]
    counts = torch.bincount(flat[kept], minlength=num_experts)
    tiles = -(counts // -tile)
    offsets = torch.nn.functional.pad(tiles.cumsum(0) * tile, (1, 0))
    firsts = counts.cumsum(0) - counts
    experts = flat[order]
    place = offsets[experts] + torch.arange(order.shape[0], device=ids.device) - firsts[experts]

    size = capacity(ids.numel(), num_experts, tile)
    slots = torch.full((size,), -1, dtype=torch.int32, device=ids.device)
    slots[place] = order.int()
    places = torch.full((ids.numel(),), -1, dtype=torch.int32, device=ids.device)
    places[order] = place.int()
    tile_experts = torch.full((size // tile,), -1, dtype=torch.int32, device=ids.device)
    numbers = torch.arange(num_experts, device=ids.device).repeat_interleave(tiles)
    tile_experts[: numbers.shape[0]] = numbers.int()
    return GroupedRows(slots, places.view(ids.shape), offsets.int(), tile_experts)
