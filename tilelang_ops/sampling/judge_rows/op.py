"""Which rows have a token: the check behind the choice."""

from __future__ import annotations

import torch
from torch import Tensor

from tilelang_ops.common.dispatch import backend

NUMERICS, NO_TOKEN = 1, 2


def judge_rows(
    token_ids: Tensor, best: Tensor, outside: Tensor | None, out: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """Flags rows without a sound token.

    Args:
        token_ids: [n] int32, what was chosen.
        best: [n] float32 largest logit of those that could be chosen, NaN where one was.
        outside: [n] float32 largest of the others, NaN likewise; None when there are no others.
        out: what the results are written to; None for new tensors.

    Returns:
        token_ids [n] int32, 0 for faulty rows; faults [n] uint8: 1 where a logit was NaN or +inf or all were
        -inf, else 2 where all that could be chosen were -inf, else 0.
    """
    assert token_ids.dtype == torch.int32 and token_ids.shape == best.shape, f"{token_ids.shape=}"
    if out is None:
        out = torch.empty_like(token_ids), torch.empty_like(token_ids, dtype=torch.uint8)
    if token_ids.shape[0] > 0:
        backend(__package__, token_ids.device).run(token_ids, best, outside, *out)
    return out
