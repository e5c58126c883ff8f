"""Scores of index queries against the entries of their candidate blocks alone."""

from __future__ import annotations

import torch
from torch import Tensor

from tilelang_ops.common.dispatch import backend
from tilelang_ops.indexer.index_scores.op import check_shapes


def candidate_scores(
    q: Tensor,
    weights: Tensor,
    code_pool: Tensor,
    scale_pool: Tensor | None,
    block_tables: Tensor,
    row_seq: Tensor,
    num_visible: Tensor,
    blocks: Tensor,
    block_size: int,
    in_fp8: bool = False,
) -> Tensor:
    """The scores of `index_scores`, bit by bit, at the entries of a row's blocks; no other key is read.

    Args:
        q, weights, code_pool, scale_pool, block_tables, row_seq, num_visible: as in `index_scores`.
        blocks: [Q, m] int32 blocks of `block_size` consecutive entries; -1 for none, behind the others.
        block_size: entries of a block.
        in_fp8: as in `index_scores`.

    Returns:
        [Q, m * block_size] float32: column c has entry blocks[c // block_size] * block_size + c % block_size;
        -inf where there is none or the row does not see it.
    """
    check_shapes(q, weights, code_pool, scale_pool, row_seq, num_visible)
    assert blocks.shape[0] == q.shape[0] and block_size > 0, f"{blocks.shape=} {q.shape=} {block_size=}"
    if blocks.numel() == 0:
        return q.new_empty(q.shape[0], blocks.shape[1] * block_size, dtype=torch.float32)
    options = {"in_fp8": True} if in_fp8 else {}  # which other backends do not know
    return backend(__package__, q.device).run(
        q, weights, code_pool, scale_pool, block_tables, row_seq, num_visible, blocks, block_size, **options
    )
