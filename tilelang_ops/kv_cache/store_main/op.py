"""Store compressed KV as FP4 records."""

from __future__ import annotations

import torch
from torch import Tensor

from tilelang_ops.common.dispatch import backend


def store_main(values: Tensor, pool: Tensor, index: Tensor) -> None:
    """Quantise vectors and write them as records.

    A record is n / 2 bytes of E2M1 pairs (even channel low), then n / 16 E4M3 scales.

    Args:
        values: [num_rows, n] float32 or bfloat16.
        pool: uint8 [parts, records, n / 2 + n / 16], or float32 [parts, records, n] to store values as they
            are; strided.
        index: [num_rows] int64 record numbers, part * records + place; -1 writes nothing. No two are equal.
    """
    assert values.shape[0] == index.shape[0], f"{values.shape=} {index.shape=}"
    n = values.shape[1]
    width = n // 2 + n // 16 if pool.dtype == torch.uint8 else n
    assert pool.shape[2] == width, f"{pool.shape=} {values.shape=}"
    if index.numel() > 0:
        backend(__package__, values.device).run(values, pool, index)
