"""index_scores in torch, row by row."""

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
    max_visible: int,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """The meaning of `index_scores`, computed and returned in `dtype`."""
    out = torch.full((q.shape[0], max_visible), -torch.inf, dtype=dtype)
    entries = code_pool.shape[1]
    for row, visible in enumerate(num_visible.tolist()):
        if visible == 0:
            continue
        place = torch.arange(visible)
        block = block_tables[row_seq[row]].long()[place // entries]
        key = code_pool[block, place % entries]
        if scale_pool is not None:
            key = decode_mxfp4(key, scale_pool[block, place % entries])
        products = (q[row].to(dtype) @ key.to(dtype).T).relu()  # [heads, visible]
        out[row, :visible] = weights[row].to(dtype) @ products
    return out
