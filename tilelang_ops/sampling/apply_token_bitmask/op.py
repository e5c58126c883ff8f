"""Forbid tokens of some rows of logits by packed bits."""

from __future__ import annotations

import torch
from torch import Tensor

from tilelang_ops.common.dispatch import backend


def apply_token_bitmask(logits: Tensor, bitmask: Tensor, rows: Tensor) -> None:
    """Sets the logits of forbidden tokens to -inf, in place; all others keep their bits.

    Token v of logits row `rows[i]` is forbidden when bit v % 32 of `bitmask[i, v // 32]` is 0. Bits behind
    the last token mean nothing.

    Args:
        logits: [R, V] float32, rows contiguous.
        bitmask: [M, ceil(V / 32)] int32.
        rows: [M] int32, distinct, 0..R-1.
    """
    assert logits.dtype == torch.float32 and logits.stride(1) == 1, f"{logits.dtype=} {logits.stride()=}"
    assert bitmask.dtype == rows.dtype == torch.int32, f"{bitmask.dtype=} {rows.dtype=}"
    words = (logits.shape[1] + 31) // 32
    assert bitmask.shape == (rows.shape[0], words), f"{bitmask.shape=} {rows.shape=} {logits.shape=}"
    assert bitmask.is_contiguous(), f"{bitmask.stride()=}"
    if rows.shape[0] > 0:
        backend(__package__, logits.device).run(logits, bitmask, rows)
