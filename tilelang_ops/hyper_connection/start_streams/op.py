"""The residual streams of rows at the bottom of a stack: copies of their embeddings, and the first mix."""

from __future__ import annotations

import torch
from torch import Tensor

from tilelang_ops.common.dispatch import backend


def start_streams(
    table: Tensor, token_ids: Tensor, num_streams: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Every stream is the embedding of the row's token; the first sublayer reads stream 0.

    Args:
        table: [vocab, width] bfloat16 or float32.
        token_ids: [n] int32, 0..vocab-1.
        num_streams: m.
        dtype: of the streams, float32 or bfloat16.

    Returns:
        streams [n, m, width] `dtype`; pre [n, m] float32, 1 for stream 0 and 0 for the others.
    """
    assert token_ids.dim() == 1 and table.dim() == 2, f"{token_ids.shape=} {table.shape=}"
    if token_ids.shape[0] == 0:
        streams = torch.empty(0, num_streams, table.shape[1], dtype=dtype, device=token_ids.device)
        return streams, torch.empty(0, num_streams, device=token_ids.device)
    return backend(__package__, token_ids.device).run(table, token_ids, num_streams, dtype)
