"""Add a bias to single logits, or forbid them."""

from __future__ import annotations

import torch
from torch import Tensor

from tilelang_ops.common.dispatch import backend


def add_to_logits(logits: Tensor, rows: Tensor, tokens: Tensor, values: Tensor | None) -> None:
    """Adds values to the logits of pairs (row, token), in place; without values they become -inf.

    Args:
        logits: [R, V] float32, rows contiguous.
        rows, tokens: [B] int32; pairs are unique where there are values.
        values: [B] float32, finite or -inf; None forbids the tokens.
    """
    assert logits.dtype == torch.float32 and logits.stride(1) == 1, f"{logits.dtype=} {logits.stride()=}"
    assert rows.shape == tokens.shape and rows.dtype == tokens.dtype == torch.int32, f"{rows.shape=}"
    assert values is None or (values.shape == rows.shape and values.dtype == torch.float32), f"{values=}"
    if rows.shape[0] > 0:
        backend(__package__, logits.device).run(logits, rows, tokens, values)
