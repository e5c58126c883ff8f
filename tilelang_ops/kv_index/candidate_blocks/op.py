"""The blocks of entries among which later layers choose."""

from __future__ import annotations

import torch
from torch import Tensor

from tilelang_ops.common.dispatch import backend


def candidate_blocks(scores: Tensor, num_visible: Tensor, block_size: int, k: int) -> Tensor:
    """The `k` best blocks of `block_size` consecutive entries, by their largest score.

    The block of the last visible entry always counts as best. Blocks without a visible entry are not chosen;
    ties go to the lower block.

    Args:
        scores: [n, width] float32, -inf at entries that are not visible.
        num_visible: [n] visible entries of each row, at most `width`.
        block_size: entries of a block.
        k: blocks per row.

    Returns:
        [n, k] int32 ascending block numbers, -1 behind the last one.
    """
    assert scores.shape[0] == num_visible.shape[0], f"{scores.shape=} {num_visible.shape=}"
    if scores.numel() == 0:
        return torch.full((scores.shape[0], k), -1, dtype=torch.int32, device=scores.device)
    return backend(__package__, scores.device).run(scores, num_visible, block_size, k)
