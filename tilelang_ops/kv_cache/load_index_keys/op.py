"""Read MXFP4 index keys of the block-split index section as vectors, contiguous."""

from __future__ import annotations

import torch
from torch import Tensor

from tilelang_ops.common.dispatch import backend


def load_index_keys(
    codes: Tensor, scales: Tensor | None, index: Tensor, dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """Decode index keys; the inverse of `store_index_keys`. Every value of theirs fits bfloat16.

    Args:
        codes: uint8 [parts, records, n / 2], or float32 [parts, records, n]; strided.
        scales: uint8 [parts, records, n / 32]; None with float32 `codes`.
        index: [num_keys] int64 record numbers, part * records + place; -1 gives zeros.
        dtype: of the result, bfloat16 or float32.

    Returns:
        [num_keys, n] `dtype`.
    """
    assert (codes.dtype == torch.uint8) == (scales is not None), f"{codes.dtype=}"
    width = codes.shape[2] * (2 if scales is not None else 1)
    if index.numel() == 0:
        return torch.empty(0, width, dtype=dtype, device=codes.device)
    return backend(__package__, codes.device).run(codes, scales, index, dtype)
