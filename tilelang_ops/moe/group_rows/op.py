"""Sort the rows of a grouped product by expert."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tilelang_ops.common.dispatch import backend


@dataclass(frozen=True)
class GroupedRows:
    """Slots sorted by expert; every expert starts at a multiple of the tile.

    Sizes are bounds that depend on shapes alone: nobody waits for the device to learn them.

        place      0 1 2 3 | 4 5 6 7 | 8 9 10 11 | 12 ...      tile 4
        slot       2 7 9 . | 0 1 3 4 | 6 . .  .  | . ...       . is -1
        tile       expert 0| expert 2| expert 2  | -1

    Attributes:
        slots: [capacity] int32, row * k + number of the slot in its row; -1 where a place is empty.
        places: [n, k] int32 the place of each slot; -1 for a slot that was left out.
        offsets: [experts + 1] int32 first place of each expert; the last number is the end of all places.
        tile_experts: [capacity / tile] int32 expert of each tile; -1 behind the last.
    """

    slots: Tensor
    places: Tensor
    offsets: Tensor
    tile_experts: Tensor


def capacity(num_slots: int, num_experts: int, tile: int) -> int:
    """Places that any choice of experts fits in, a multiple of the tile."""
    padded = num_slots + min(num_slots, num_experts) * (tile - 1)
    return padded // tile * tile


def group_rows(ids: Tensor, num_experts: int, tile: int) -> GroupedRows:
    """Sort slots by expert, those of an expert in ascending order.

    Args:
        ids: [n, k] int32 the expert of each slot; a slot whose id is outside 0 ... num_experts - 1 is left
            out (an expert of another rank, or a row that is none).
        num_experts: E.
        tile: rows of the product's tile.
    """
    assert ids.dim() == 2 and ids.dtype == torch.int32 and ids.is_contiguous(), f"{ids.shape=} {ids.dtype=}"
    return backend(__package__, ids.device).run(ids, num_experts, tile)
