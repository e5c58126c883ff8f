"""Store index keys as MXFP4 fields of the block-split index section."""

from __future__ import annotations

import torch
from torch import Tensor

from tilelang_ops.common.dispatch import backend


def store_index_keys(keys: Tensor, codes: Tensor, scales: Tensor | None, index: Tensor) -> None:
    """Quantise keys and write their code and scale fields.

    Args:
        keys: [num_rows, n] float32 or bfloat16.
        codes: uint8 [parts, records, n / 2], or float32 [parts, records, n] to store keys unrounded; strided.
        scales: uint8 [parts, records, n / 32]; None with float32 `codes`.
        index: [num_rows] int64 record numbers, part * records + place; -1 writes nothing. No two are equal.
    """
    assert keys.shape[0] == index.shape[0], f"{keys.shape=} {index.shape=}"
    assert (codes.dtype == torch.uint8) == (scales is not None), f"{codes.dtype=}"
    if index.numel() > 0:
        backend(__package__, keys.device).run(keys, codes, scales, index)
