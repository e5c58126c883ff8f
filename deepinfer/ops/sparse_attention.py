"""The CPU kernel of `tilelang_ops.attention.sparse_attention`, in the place of its torch reference.

Segments of 64 keys are summed key after key in float32 and merged in order, so a row's bits are a function of
its query and its list of keys alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.ops.cpu import context, is_bfloat16, require_cpu
from tilelang_ops.attention.sparse_attention.op import MAIN_BYTES
from tilelang_ops.common.dispatch import register as register_backend


def register() -> None:
    """Serve CPU tensors by the kernel of this file."""
    register_backend("tilelang_ops.attention.sparse_attention", "cpu", sparse_attention)


def sparse_attention(
    q: Tensor,
    window_pool: Tensor,
    window_index: Tensor,
    main_pool: Tensor | None,
    main_index: Tensor | None,
    sink: Tensor,
    scale: float,
) -> Tensor:
    """`tilelang_ops.attention.sparse_attention`.

    Raises:
        IndexError: an index past its pool.
    """
    num_rows, heads = q.shape[:2]
    require_cpu("sparse_attention", q, window_pool, window_index, main_pool, main_index, sink)
    q, sink = q.contiguous(), sink.contiguous()
    out = torch.empty_like(q)
    window = _pool(window_pool, window_index)
    main = (0, 0, 1, 0, 0, MAIN_BYTES, 0, 0, 0)
    if main_pool is not None and main_index is not None:
        main = _pool(main_pool, main_index)
    context().sparse_attention(
        q.data_ptr(), is_bfloat16(q), out.data_ptr(), num_rows, heads, window, main, sink.data_ptr(), scale
    )
    return out


def _pool(pool: Tensor, index: Tensor) -> tuple[int, ...]:
    """What the kernel reads of a pool and its index; strides in bytes."""
    size = pool.element_size()
    return (
        pool.data_ptr(),
        pool.shape[0],
        pool.shape[1],
        pool.stride(0) * size,
        pool.stride(1) * size,
        pool.shape[2] * size,
        index.data_ptr(),
        index.shape[1],
        index.stride(0),
    )
