"""Take tokens out of all rows of logits, and keep what a check of the rows needs of them."""

from __future__ import annotations

import torch
from torch import Tensor

from tilelang_ops.common.dispatch import backend


def ban_tokens(logits: Tensor, token_ids: Tensor) -> Tensor:
    """Sets the logits of some tokens to -inf, in place.

    Args:
        logits: [n, vocab] float32, contiguous.
        token_ids: [m] int32, m at least 1.

    Returns:
        [n] float32 largest of what those logits were; NaN where one was NaN.
    """
    assert logits.dtype == torch.float32 and logits.is_contiguous(), f"{logits.dtype=} {logits.stride()=}"
    assert token_ids.dtype == torch.int32 and token_ids.shape[0] > 0, f"{token_ids.dtype=} {token_ids.shape=}"
    if logits.shape[0] == 0:
        return logits.new_empty(0)
    return backend(__package__, logits.device).run(logits, token_ids)
