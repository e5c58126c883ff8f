"""Read window and main records as vectors, contiguous."""

from __future__ import annotations

import torch
from torch import Tensor

from tilelang_ops.common.dispatch import backend


def load_records(pool: Tensor, index: Tensor, width: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Decode records; the inverse of `store_window` and `store_main`. Every value of theirs fits bfloat16.

    Args:
        pool: [parts, records, fields], strided: uint8 with width + width / 32 bytes (FP8) or width / 2 +
            width / 16 bytes (FP4), or float32 with `width` channels.
        index: [n] int64 record numbers, part * records + place; -1 gives zeros.
        width: channels of a record.
        dtype: of the result, bfloat16 or float32.

    Returns:
        [n, width] `dtype`.
    """
    widths = (width + width // 32, width // 2 + width // 16) if pool.dtype == torch.uint8 else (width,)
    assert pool.shape[2] in widths and index.dim() == 1, f"{pool.shape=} {width=} {index.shape=}"
    if index.numel() == 0:
        return torch.empty(0, width, dtype=dtype, device=pool.device)
    return backend(__package__, pool.device).run(pool, index, width, dtype)
