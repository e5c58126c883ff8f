"""Gather rows by number."""

from __future__ import annotations

import torch
from torch import Tensor

from tilelang_ops.common.dispatch import backend


def gather_rows(src: Tensor, index: Tensor, divisor: int = 1) -> Tensor:
    """`out[i] = src[index[i] // divisor]`; an index outside the rows, negative ones included, gives zeros.

    Args:
        src: [num_rows, width] of any dtype, contiguous.
        index: [...] int32 or int64.
        divisor: entries of the index that share a row.

    Returns:
        [..., width], the dtype of `src`.
    """
    assert src.dim() == 2 and src.is_contiguous() and divisor > 0, f"{src.shape=} {src.stride()=} {divisor=}"
    if index.numel() == 0 or src.shape[0] == 0:
        return torch.zeros(*index.shape, src.shape[1], dtype=src.dtype, device=src.device)
    return backend(__package__, src.device).run(src, index, divisor)
