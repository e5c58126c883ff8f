"""Scores of index queries against the index keys of their own sequence, read from the paged pool."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.ops.cpu import context, is_bfloat16, require_cpu
from deepinfer.ops.quant import decode_mxfp4

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

    Channels are added in order, then heads in order, so a score is a function of its query and key alone.

    Args:
        q: [Q, heads, 128] float32 or bfloat16, the rounded values.
        weights: [Q, heads] float32 or bfloat16.
        code_pool: uint8 [blocks, entries, 64] with `scale_pool` uint8 [blocks, entries, 4]; or float32
            [blocks, entries, 128] with `scale_pool` None. Strided, last dimension contiguous.
        block_tables: [S, max_blocks] int32; entry j lies in a sequence's block j // entries, at j % entries
        row_seq: [Q] int32 sequence of each row.
        num_visible: [Q] int32; row i sees entries 0 ... num_visible[i] - 1.
        max_visible: columns of the result, at least max(num_visible), which it is when None.

    Returns:
        [Q, max_visible] float32, -inf at entries that the row does not see.

    Raises:
        IndexError: a sequence, block or number of entries past its bound.
    """
    num_rows, heads = q.shape[:2]
    assert q.shape[2] == WIDTH and weights.shape == (num_rows, heads), f"{q.shape=} {weights.shape=}"
    is_float = code_pool.dtype == torch.float32
    assert code_pool.shape[2] == (WIDTH if is_float else CODE_BYTES), f"{code_pool.shape=}"
    assert is_float == (scale_pool is None) and code_pool.stride(2) == 1, f"{code_pool.stride()=}"
    for index in (block_tables, row_seq, num_visible):
        assert index.dtype == torch.int32 and index.stride(-1) == 1, f"{index.dtype=} {index.stride()=}"
    assert row_seq.shape == num_visible.shape == (num_rows,), f"{row_seq.shape=} {num_visible.shape=}"
    require_cpu("index_scores", q, weights, code_pool, scale_pool, block_tables, row_seq, num_visible)
    if max_visible is None:
        max_visible = int(num_visible.max()) if num_rows else 0
    scales = (0, 0, 0)
    if scale_pool is not None:
        assert scale_pool.shape == (*code_pool.shape[:2], SCALE_BYTES), f"{scale_pool.shape=}"
        assert scale_pool.dtype == torch.uint8 and scale_pool.stride(2) == 1, f"{scale_pool.stride()=}"
        scales = (scale_pool.data_ptr(), scale_pool.stride(0), scale_pool.stride(1))
    q, weights = q.contiguous(), weights.contiguous()
    size = code_pool.element_size()
    out = torch.empty(num_rows, max_visible)
    context().index_scores(
        q.data_ptr(),
        is_bfloat16(q),
        weights.data_ptr(),
        is_bfloat16(weights),
        code_pool.data_ptr(),
        code_pool.stride(0) * size,
        code_pool.stride(1) * size,
        *scales,
        code_pool.shape[0],
        code_pool.shape[1],
        block_tables.data_ptr(),
        block_tables.shape[0],
        block_tables.shape[1],
        block_tables.stride(0),
        row_seq.data_ptr(),
        num_visible.data_ptr(),
        out.data_ptr(),
        num_rows,
        heads,
        max_visible,
    )
    return out


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
    """The meaning of `index_scores`, row by row, computed and returned in `dtype`."""
    out = torch.full((q.shape[0], max_visible), float("-inf"), dtype=dtype)
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
