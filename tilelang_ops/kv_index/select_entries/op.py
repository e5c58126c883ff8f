"""The best entries of each row, in ascending order."""

from __future__ import annotations

import torch
from torch import Tensor

from tilelang_ops.common.dispatch import backend


def select_entries(scores: Tensor, k: int, blocks: Tensor | None = None, block_size: int = 0) -> Tensor:
    """The `k` largest scores of each row, ties to the lower column, as ascending columns.

    Args:
        scores: [n, width] float32; -inf is never chosen. The width does not change the result.
        k: entries per row.
        blocks: [n, width // block_size] int32 ascending blocks of entries, -1 behind the last. When given,
            entries are returned in the place of columns: column c stands for entry
            blocks[c // block_size] * block_size + c % block_size.
        block_size: entries of a block.

    Returns:
        [n, k] int32, -1 behind the last one where fewer than `k` can be chosen.
    """
    assert scores.dim() == 2 and k > 0, f"{scores.shape=} {k=}"
    if blocks is not None:
        size = blocks.shape[0], blocks.shape[1] * block_size
        assert scores.shape == size, f"{scores.shape=} {blocks.shape=} {block_size=}"
    if scores.numel() == 0:
        return torch.full((scores.shape[0], k), -1, dtype=torch.int32, device=scores.device)
    return backend(__package__, scores.device).run(scores, k, blocks, block_size)


def entries_of(columns: Tensor, blocks: Tensor | None, block_size: int) -> Tensor:
    """The entries that columns ([n, k] int32, -1 for none) stand for; in torch, for backends that need it."""
    if blocks is None:
        return columns
    block = blocks.gather(1, (columns.clamp(min=0) // block_size).long())
    return torch.where(columns < 0, -1, block * block_size + columns % block_size)
