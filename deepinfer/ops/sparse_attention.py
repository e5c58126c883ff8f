"""Attention of queries over listed records of two pools, read where they lie, with a sink in the sum."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.ops.cpu import context, is_bfloat16, require_cpu
from deepinfer.ops.quant import decode_fp4, decode_fp8

WIDTH = 512  # channels of a key, which is the value too
WINDOW_BYTES = 528  # 512 E4M3 codes, 16 E8M0 scales over 32 channels
MAIN_BYTES = 288  # 256 bytes of E2M1 pairs (even channel low), 32 E4M3 scales over 16 channels
FLOAT_BYTES = 4 * WIDTH


def sparse_attention(
    q: Tensor,
    window_pool: Tensor,
    window_index: Tensor,
    main_pool: Tensor | None,
    main_index: Tensor | None,
    sink: Tensor,
    scale: float,
) -> Tensor:
    """`sum_k exp(l_k) V_k / (exp(sink_h) + sum_k exp(l_k))` with `l_k = scale * q_h . K_k`, in float32.

    The keys of a row keep the order of its indices, the window first; a negative index is no key. Segments
    of 64 keys are summed key after key and merged in order, so the result is a function of the row's query
    and its list of keys alone. A row without keys yields zeros.

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
        IndexError: an index past its pool.
    """
    num_rows, heads = q.shape[:2]
    assert q.shape[2] == WIDTH and sink.shape == (heads,), f"{q.shape=} {sink.shape=}"
    assert sink.dtype == torch.float32, f"{sink.dtype=}"
    assert (main_pool is None) == (main_index is None), "main_pool and main_index come together"
    require_cpu("sparse_attention", q, window_pool, window_index, main_pool, main_index, sink)
    q, sink = q.contiguous(), sink.contiguous()
    out = torch.empty_like(q)
    window = _pool(window_pool, window_index, num_rows, WINDOW_BYTES)
    main = (0, 0, 1, 0, 0, MAIN_BYTES, 0, 0, 0)
    if main_pool is not None and main_index is not None:
        main = _pool(main_pool, main_index, num_rows, MAIN_BYTES)
    context().sparse_attention(
        q.data_ptr(), is_bfloat16(q), out.data_ptr(), num_rows, heads, window, main, sink.data_ptr(), scale
    )
    return out


def _pool(pool: Tensor, index: Tensor, num_rows: int, record_bytes: int) -> tuple[int, ...]:
    """What the kernel reads of a pool and its index; strides in bytes."""
    size = pool.element_size()
    assert pool.dtype == torch.uint8 or pool.dtype == torch.float32, f"{pool.dtype=}"
    assert pool.shape[2] == (record_bytes if pool.dtype == torch.uint8 else WIDTH), f"{pool.shape=}"
    assert pool.stride(2) == 1 and index.stride(1) == 1, f"{pool.stride()=} {index.stride()=}"
    assert index.dtype == torch.int32 and index.shape[0] == num_rows, f"{index.dtype=} {index.shape=}"
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


def sparse_attention_reference(
    q: Tensor,
    window_pool: Tensor,
    window_index: Tensor,
    main_pool: Tensor | None,
    main_index: Tensor | None,
    sink: Tensor,
    scale: float,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """The meaning of `sparse_attention`, row by row, computed and returned in `dtype`."""
    out = torch.zeros(q.shape, dtype=dtype)
    for row in range(q.shape[0]):
        keys = [_records(window_pool, window_index[row])]
        if main_pool is not None and main_index is not None:
            keys.append(_records(main_pool, main_index[row]))
        key = torch.cat(keys).to(dtype)  # [n, 512]
        if key.shape[0] == 0:
            continue
        logits = q[row].to(dtype) @ key.T * scale  # [H, n]
        with_sink = torch.cat([logits, sink[:, None].to(dtype)], dim=1)
        out[row] = with_sink.softmax(dim=1)[:, :-1] @ key
    return out


def _records(pool: Tensor, index: Tensor) -> Tensor:
    """[n, 512] float32 values of the records that `index` names, negative ones left out."""
    index = index[index >= 0].long()
    records = pool[index // pool.shape[1], index % pool.shape[1]]
    if pool.dtype == torch.float32:
        return records
    if pool.shape[2] == WINDOW_BYTES:
        return decode_fp8(records[:, :WIDTH], records[:, WIDTH:])
    return decode_fp4(records[:, : WIDTH // 2], records[:, WIDTH // 2 :])
