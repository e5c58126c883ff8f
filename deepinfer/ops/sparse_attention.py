"""Attention of queries over listed records of two pools, read where they lie, with a sink in the denominator."""

from __future__ import annotations

import torch
from torch import Tensor

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
    """`sum_k exp(l_k) V_k / (exp(sink_h) + sum_k exp(l_k))` with `l_k = scale * q_h . K_k`, in float32.

    The keys of a row are visited in index order, the window first; an index of -1 is no key. The result is a
    function of the row's query and its list of keys alone. A row without keys yields zeros.

    Args:
        q: [Q, H, 512] float32 or bfloat16.
        window_pool: uint8 [slots, ring, 528], or float32 [slots, ring, 512]; strided, last dimension contiguous.
        window_index: [Q, W] int32, slot * ring + place in the ring.
        main_pool: uint8 [blocks, entries, 288], or float32 [blocks, entries, 512]; strided; None without entries.
        main_index: [Q, K] int32, block * entries + place in the block; None without entries.
        sink: [H] float32 logits, not scaled.
        scale: factor of the dot products.

    Returns:
        [Q, H, 512] of `q`'s dtype.
    """
    assert q.dim() == 3 and q.shape[2] == WIDTH and sink.shape == (q.shape[1],), f"{q.shape=} {sink.shape=}"
    return sparse_attention_reference(q, window_pool, window_index, main_pool, main_index, sink, scale)


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
    """The meaning of `sparse_attention`, row by row, computed in `dtype`."""
    out = torch.zeros(q.shape, dtype=q.dtype)
    for row in range(q.shape[0]):
        keys = [_records(window_pool, window_index[row])]
        if main_pool is not None and main_index is not None:
            keys.append(_records(main_pool, main_index[row]))
        key = torch.cat(keys).to(dtype)  # [n, 512]
        if key.shape[0] == 0:
            continue
        logits = q[row].to(dtype) @ key.T * scale  # [H, n]
        with_sink = torch.cat([logits, sink[:, None].to(dtype)], dim=1)
        out[row] = (with_sink.softmax(dim=1)[:, :-1] @ key).to(q.dtype)
    return out


def _records(pool: Tensor, index: Tensor) -> Tensor:
    """[n, 512] float32 values of the records that `index` names, -1 left out."""
    index = index[index >= 0].long()
    rows = pool[index // pool.shape[1], index % pool.shape[1]]
    if pool.dtype == torch.float32:
        return rows
    return decode_window(rows) if pool.shape[2] == WINDOW_BYTES else decode_main(rows)


def decode_window(records: Tensor) -> Tensor:
    """uint8 [n, 528] window records -> float32 [n, 512]."""
    codes = records[:, :WIDTH].contiguous().view(torch.float8_e4m3fn).float()
    scales = decode_e8m0(records[:, WIDTH:])
    return (codes.unflatten(1, (-1, 32)) * scales[..., None]).flatten(1)


def decode_main(records: Tensor) -> Tensor:
    """uint8 [n, 288] main records -> float32 [n, 512]."""
    scales = records[:, WIDTH // 2 :].contiguous().view(torch.float8_e4m3fn).float()
    return (decode_e2m1(records[:, : WIDTH // 2]).unflatten(1, (-1, 16)) * scales[..., None]).flatten(1)


def decode_e2m1(codes: Tensor) -> Tensor:
    """uint8 [..., n] pairs of E2M1 codes, the even one in the low nibble -> float32 [..., 2 n]."""
    magnitude = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    table = torch.tensor(magnitude + [-m for m in magnitude])
    return table[torch.stack([codes & 15, codes >> 4], dim=-1).flatten(-2).long()]


def decode_e8m0(codes: Tensor) -> Tensor:
    """uint8 exponents -> float32 2^(code - 127); 255 is NaN."""
    return codes.contiguous().view(torch.float8_e8m0fnu).float()
