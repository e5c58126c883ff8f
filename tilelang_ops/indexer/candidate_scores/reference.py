"""candidate_scores in torch, row by row."""

from __future__ import annotations

import torch
from torch import Tensor

from tilelang_ops.common.numerics import decode_mxfp4


def run(
    q: Tensor,
    weights: Tensor,
    code_pool: Tensor,
    scale_pool: Tensor | None,
    block_tables: Tensor,
    row_seq: Tensor,
    num_visible: Tensor,
    blocks: Tensor,
    block_size: int,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """The meaning of `candidate_scores`, computed and returned in `dtype`."""
    out = torch.full((q.shape[0], blocks.shape[1] * block_size), -torch.inf, dtype=dtype)
    entries = code_pool.shape[1]
    within = torch.arange(block_size)
    for row, visible in enumerate(num_visible.tolist()):
        entry = torch.where(blocks[row, :, None] < 0, visible, blocks[row, :, None] * block_size + within)
        columns = (entry.flatten() < visible).nonzero().flatten()
        place = entry.flatten()[columns].long()
        block = block_tables[row_seq[row]].long()[place // entries]
        key = code_pool[block, place % entries]
        if scale_pool is not None:
            key = decode_mxfp4(key, scale_pool[block, place % entries])
        out[row, columns] = weights[row].to(dtype) @ (q[row].to(dtype) @ key.to(dtype).T).relu()
    return out
