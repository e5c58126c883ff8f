"""Gather rows of a large table and widen them."""

from __future__ import annotations

import torch
from torch import Tensor

from tilelang_ops.common.dispatch import backend


def gather_dequantize(table: Tensor, scales: Tensor | None, index: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows of a table by number; only the rows asked for are read.

    Args:
        table: [rows, width]; bytes of E4M3 (uint8 or float8_e4m3fn) when there are scales, else bfloat16 or
            float32. It and the scales lie where `index` does, or in pinned host memory that a GPU reads.
        scales: [rows, width / 32] bytes of E8M0 (uint8 or float8_e8m0fnu), or None.
        index: [...] int32, 0..rows-1.
        dtype: float32 or bfloat16; both hold an E4M3 value with its scale exactly.

    Returns:
        [..., width] `dtype`.
    """
    assert scales is None or scales.shape[1] * 32 == table.shape[1], f"{table.shape=} {scales.shape=}"
    if index.numel() == 0:
        return torch.empty(*index.shape, table.shape[1], dtype=dtype, device=index.device)
    return backend(__package__, index.device).run(table, scales, index, dtype)
