"""Draw a token per row of scores by Gumbel noise."""

from __future__ import annotations

import torch
from torch import Tensor

from tilelang_ops.common.dispatch import backend


def draw_tokens(scores: Tensor, seeds: Tensor, token_index: Tensor, domain: int = 0) -> Tensor:
    """The argmax of float32(score + noise) per row, which follows softmax(scores); ties go to the lowest id.

    The noise is that of `common/noise.py`. Equal scores give equal tokens on every device, in any batch.

    Args:
        scores: [R, V] float32, finite or -inf.
        seeds, token_index: [R] int64, seed (bit pattern) and index of the token that each row generates.
        domain: the noise stream, 0 ... 2^31 - 1.

    Returns:
        [R] int32 token ids; 0 for a row without a possible token, or with NaN or +inf in it.
    """
    assert scores.dtype == torch.float32, f"{scores.dtype=}"
    assert seeds.shape == token_index.shape == scores.shape[:1], f"{seeds.shape=} {token_index.shape=}"
    assert seeds.dtype == token_index.dtype == torch.int64, f"{seeds.dtype=} {token_index.dtype=}"
    if scores.shape[0] == 0:
        return seeds.new_empty(0, dtype=torch.int32)
    return backend(__package__, scores.device).run(scores, seeds, token_index, domain)
