"""Scores of index queries against the keys of their sequence."""

from __future__ import annotations

import torch
from torch import Tensor

from tilelang_ops.common.dispatch import backend

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
    max_visible: int,
    in_fp8: bool = False,
) -> Tensor:
    """`sum_h weights[h] * relu(q_h . key_j)` in float32 for the entries j that a row may see.

    A score is a function of its query and key alone, and of `in_fp8`, bit by bit.

    Args:
        q: [Q, heads, 128] float32 or bfloat16, the rounded values.
        weights: [Q, heads] float32 or bfloat16.
        code_pool: uint8 [blocks, entries, 64] with `scale_pool` uint8 [blocks, entries, 4]; or float32
            [blocks, entries, 128] with `scale_pool` None. Strided, last dimension contiguous.
        block_tables: [S, max_blocks] int32; entry j lies in a sequence's block j // entries, at j % entries.
        row_seq: [Q] int32 sequence of each row.
        num_visible: [Q] int32; row i sees entries 0 ... num_visible[i] - 1.
        max_visible: columns of the result, at least max(num_visible).
        in_fp8: on SM90 GPUs alone: multiply in FP8 (doc/kernels.md says how exactly). `q` holds MXFP4 values,
            keys are codes, and a group of zeros in a key has no larger scale than the others, as encoders
            write it.

    Returns:
        [Q, max_visible] float32, -inf at entries that the row does not see.
    """
    check_shapes(q, weights, code_pool, scale_pool, row_seq, num_visible)
    num_rows = q.shape[0]
    if num_rows == 0 or max_visible == 0:
        return q.new_empty(num_rows, max_visible, dtype=torch.float32)
    options = {"in_fp8": True} if in_fp8 else {}  # which other backends do not know
    return backend(__package__, q.device).run(
        q, weights, code_pool, scale_pool, block_tables, row_seq, num_visible, max_visible, **options
    )


def check_shapes(
    q: Tensor,
    weights: Tensor,
    code_pool: Tensor,
    scale_pool: Tensor | None,
    row_seq: Tensor,
    num_visible: Tensor,
) -> None:
    """Assert what the operators of this family demand of their arguments."""
    num_rows, heads = q.shape[:2]
    assert q.shape[2] == WIDTH and weights.shape == (num_rows, heads), f"{q.shape=} {weights.shape=}"
    is_float = code_pool.dtype == torch.float32
    assert code_pool.shape[2] == (WIDTH if is_float else CODE_BYTES), f"{code_pool.shape=}"
    assert is_float == (scale_pool is None) and code_pool.stride(2) == 1, f"{code_pool.stride()=}"
    assert row_seq.shape == num_visible.shape == (num_rows,), f"{row_seq.shape=} {num_visible.shape=}"
