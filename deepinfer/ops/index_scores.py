"""Scores of index queries against the index keys of their own sequence, read from the paged pool."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.ops.sparse_attention import decode_e2m1, decode_e8m0

WIDTH = 128  # channels of an index key
CODE_BYTES = 64  # E2M1 pairs, even channel low
SCALE_BYTES = 4  # E8M0 over 32 channels


def index_scores(
    q: Tensor,
    weights: Tensor,
    code_pool: Tensor,
    scale_pool: Tensor | None,
    block_tables: Tensor,
    row_seq: Tensor,
    num_visible: Tensor,
    max_visible: int | None = None,
) -> Tensor:
    """`sum_h weights[h] * relu(q_h . key_j)` in float32 for the entries j that a row may see.

    Args:
        q: [Q, heads, 128] float32 or bfloat16, the rounded values.
        weights: [Q, heads] float32 or bfloat16.
        code_pool: uint8 [blocks, entries, 64] with `scale_pool` uint8 [blocks, entries, 4]; or float32
            [blocks, entries, 128] with `scale_pool` None. Strided, last dimension contiguous.
        block_tables: [S, max_blocks] int32; entry j of a sequence lies in its block j // entries at j % entries.
        row_seq: [Q] int32 sequence of each row.
        num_visible: [Q] int32; row i sees entries 0 ... num_visible[i] - 1.
        max_visible: columns of the result, at least max(num_visible), which it is when None.

    Returns:
        [Q, max_visible] float32, -inf at entries that the row does not see.
    """
    if max_visible is None:
        max_visible = int(num_visible.max()) if q.shape[0] else 0
    return index_scores_reference(
        q, weights, code_pool, scale_pool, block_tables, row_seq, num_visible, max_visible
    )


def index_scores_reference(
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
    """The meaning of `index_scores`, row by row, computed in `dtype`."""
    out = torch.full((q.shape[0], max_visible), float("-inf"))
    entries = code_pool.shape[1]
    for row, visible in enumerate(num_visible.tolist()):
        place = torch.arange(visible)
        block = block_tables[row_seq[row]].long()[place // entries]
        key = code_pool[block, place % entries]
        if scale_pool is not None:
            scales = decode_e8m0(scale_pool[block, place % entries])
            key = (decode_e2m1(key).unflatten(1, (-1, 32)) * scales[..., None]).flatten(1)
        # One key after another: the shape of the product must not depend on what else is visible.
        products = (q[row].to(dtype)[None] * key.to(dtype)[:, None]).sum(-1).relu()  # [visible, heads]
        out[row, :visible] = (products * weights[row].to(dtype)).sum(-1).float()
    return out
