"""Attention of queries over listed records of two pools, read where they lie, with a sink in the sum."""

from __future__ import annotations

import torch
from torch import Tensor

from tilelang_ops.common.dispatch import backend

WIDTH = 512  # channels of a key, which is the value too
WINDOW_BYTES = 528  # 512 E4M3 codes, 16 E8M0 scales over 32 channels
MAIN_BYTES = 288  # 256 bytes of E2M1 pairs (even channel low), 32 E4M3 scales over 16 channels


def sparse_attention(
    q: Tensor,
    window_pool: Tensor,
    window_index: Tensor,
    main_pool: Tensor | None,
    main_index: Tensor | None,
    sink: Tensor,
    scale: float,
) -> Tensor:
    """`sum_k exp(l_k) V_k / (exp(sink_h) + sum_k exp(l_k))` with `l_k = scale * q_h . K_k`.

    The keys of a row keep the order of its indices, the window first; a negative index is no key. The result
    is a function of the row's query and its list of keys alone. A row without keys yields zeros.

    Args:
        q: [Q, H, 512] float32 or bfloat16.
        window_pool: uint8 [slots, ring, 528] or float32 [slots, ring, 512]; the last dimension contiguous.
        window_index: [Q, W] int32, slot * ring + place in the ring.
        main_pool: uint8 [blocks, entries, 288] or float32 [blocks, entries, 512], or None; likewise.
        main_index: [Q, K] int32, block * entries + place in the block; None without a pool.
        sink: [H] float32 logits, not scaled.
        scale: factor of the dot products.

    Returns:
        [Q, H, 512] of `q`'s dtype.

    Raises:
        IndexError: an index past its pool, found on the CPU alone.
    """
    num_rows, heads = q.shape[:2]
    assert q.shape[2] == WIDTH and sink.shape == (heads,), f"{q.shape=} {sink.shape=}"
    assert q.dtype in (torch.float32, torch.bfloat16) and sink.dtype == torch.float32, (
        f"{q.dtype=} {sink.dtype=}"
    )
    assert (main_pool is None) == (main_index is None), "main_pool and main_index come together"
    _check(window_pool, window_index, num_rows, WINDOW_BYTES)
    if main_pool is not None and main_index is not None:
        _check(main_pool, main_index, num_rows, MAIN_BYTES)
    if num_rows == 0:
        return torch.empty_like(q)
    run = backend(__package__, q.device).run
    return run(q, window_pool, window_index, main_pool, main_index, sink, scale)


def _check(pool: Tensor, index: Tensor, num_rows: int, record_bytes: int) -> None:
    assert pool.dtype in (torch.uint8, torch.float32), f"{pool.dtype=}"
    assert pool.shape[2] == (record_bytes if pool.dtype == torch.uint8 else WIDTH), f"{pool.shape=}"
    assert pool.stride(2) == 1 and index.stride(1) == 1, f"{pool.stride()=} {index.stride()=}"
    assert index.dtype == torch.int32 and index.shape[0] == num_rows, f"{index.dtype=} {index.shape=}"
