"""Torch meaning of `sparse_attention`."""

from __future__ import annotations

import torch
from torch import Tensor

from tilelang_ops.attention.sparse_attention.op import WIDTH, WINDOW_BYTES
from tilelang_ops.common.numerics import decode_fp4, decode_fp8


def run(
    q: Tensor,
    window_pool: Tensor,
    window_index: Tensor,
    main_pool: Tensor | None,
    main_index: Tensor | None,
    sink: Tensor,
    scale: float,
) -> Tensor:
    args = window_pool, window_index, main_pool, main_index, sink, scale
    return attend(q, *args, torch.float32).to(q.dtype)


def attend(
    q: Tensor,
    window_pool: Tensor,
    window_index: Tensor,
    main_pool: Tensor | None,
    main_index: Tensor | None,
    sink: Tensor,
    scale: float,
    dtype: torch.dtype,
) -> Tensor:
    """The same row by row, computed and returned in `dtype`."""
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
