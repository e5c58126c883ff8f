"""The CPU kernels of `tilelang_ops.indexer`, in the place of the torch references.

Channels are added in order, then heads in order, so a score is a function of its query and key alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.ops.cpu import context, is_bfloat16, require_cpu
from tilelang_ops.common.dispatch import register as register_backend
from tilelang_ops.indexer.index_scores.op import SCALE_BYTES


def register() -> None:
    """Serve CPU tensors by the kernels of this file."""
    register_backend("tilelang_ops.indexer.index_scores", "cpu", index_scores)
    register_backend("tilelang_ops.indexer.candidate_scores", "cpu", candidate_scores)


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
    """`tilelang_ops.indexer.index_scores`, in float32 also where a GPU would multiply in FP8.

    Raises:
        IndexError: a sequence, block or number of entries past its bound.
    """
    out = torch.empty(q.shape[0], max_visible)
    _run(
        "index_scores",
        q,
        weights,
        code_pool,
        scale_pool,
        block_tables,
        row_seq,
        num_visible,
        out,
        max_visible,
    )
    return out


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
    """`tilelang_ops.indexer.candidate_scores`, likewise.

    Raises:
        IndexError: a sequence, block or number of entries past its bound.
    """
    require_cpu("candidate_scores", blocks)
    assert blocks.dtype == torch.int32, f"{blocks.dtype=}"
    blocks = blocks.contiguous()
    out = torch.empty(q.shape[0], blocks.shape[1] * block_size)
    max_visible = block_tables.shape[1] * code_pool.shape[1]
    more = blocks.data_ptr(), blocks.shape[1], block_size
    _run(
        "candidate_scores",
        q,
        weights,
        code_pool,
        scale_pool,
        block_tables,
        row_seq,
        num_visible,
        out,
        max_visible,
        *more,
    )
    return out


def _run(
    name: str,
    q: Tensor,
    weights: Tensor,
    code_pool: Tensor,
    scale_pool: Tensor | None,
    block_tables: Tensor,
    row_seq: Tensor,
    num_visible: Tensor,
    out: Tensor,
    max_visible: int,
    *more: int,
) -> None:
    for index in (block_tables, row_seq, num_visible):
        assert index.dtype == torch.int32 and index.stride(-1) == 1, f"{index.dtype=} {index.stride()=}"
    require_cpu(name, q, weights, code_pool, scale_pool, block_tables, row_seq, num_visible)
    scales = (0, 0, 0)
    if scale_pool is not None:
        assert scale_pool.shape == (*code_pool.shape[:2], SCALE_BYTES), f"{scale_pool.shape=}"
        assert scale_pool.dtype == torch.uint8 and scale_pool.stride(2) == 1, f"{scale_pool.stride()=}"
        scales = (scale_pool.data_ptr(), scale_pool.stride(0), scale_pool.stride(1))
    q, weights = q.contiguous(), weights.contiguous()
    size = code_pool.element_size()
    getattr(context(), name)(
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
        *q.shape[:2],
        max_visible,
        *more,
    )
