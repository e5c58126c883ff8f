"""Forbid all tokens of some rows but those of a list."""

from __future__ import annotations

import torch
from torch import Tensor

from tilelang_ops.common.dispatch import backend


def keep_listed(logits: Tensor, rows: Tensor, offsets: Tensor, tokens: Tensor) -> None:
    """Sets the logits of tokens outside a row's list to -inf, in place; all others keep their bits.

    Args:
        logits: [R, V] float32, rows contiguous.
        rows: [A] int32, distinct.
        offsets: [A + 1] int32, ascending from 0.
        tokens: [M] int32; the list of `rows[i]` is tokens[offsets[i] : offsets[i + 1]], in any order.
    """
    assert logits.dtype == torch.float32 and logits.stride(1) == 1, f"{logits.dtype=} {logits.stride()=}"
    assert offsets.shape[0] == rows.shape[0] + 1, f"{offsets.shape=} {rows.shape=}"
    assert rows.dtype == offsets.dtype == tokens.dtype == torch.int32, f"{rows.dtype=} {tokens.dtype=}"
    if rows.shape[0] > 0:
        backend(__package__, logits.device).run(logits, rows, offsets, tokens)
