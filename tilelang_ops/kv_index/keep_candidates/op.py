"""Hide the entries outside the candidate blocks."""

from __future__ import annotations

from torch import Tensor

from tilelang_ops.common.dispatch import backend


def keep_candidates(scores: Tensor, blocks: Tensor, block_size: int) -> None:
    """Set the scores of entries outside a row's blocks to -inf, in place.

    Args:
        scores: [n, width] float32, contiguous.
        blocks: [n, k] int32 block numbers, -1 for none; every other one starts inside the width.
        block_size: entries of a block.
    """
    assert scores.shape[0] == blocks.shape[0] and scores.is_contiguous(), f"{scores.shape=} {blocks.shape=}"
    if scores.numel() > 0:
        backend(__package__, scores.device).run(scores, blocks, block_size)
