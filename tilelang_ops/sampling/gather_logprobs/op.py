"""Log-probabilities of given tokens and of the most likely ones, from rows of scores."""

from __future__ import annotations

import torch
from torch import Tensor

from tilelang_ops.common.dispatch import backend

FLOOR = -9999.0  # log-probability of the impossible


def gather_logprobs(scores: Tensor, token_ids: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-softmax of each row at a token and at its `num_top` best ones, floored at -9999.

    Ids and ranks are exact. Sums are made in float64 in an order that a row alone decides, so the bits of a
    log-probability do not depend on the batch; between devices they may differ in the last place.

    Args:
        scores: [L, V] float32, -inf where impossible.
        token_ids: [L] int64.
        num_top: K' >= 0; K = min(K', V).

    Returns:
        chosen [L] float32; ranks [L] int32, 1 + tokens that come before the given one in descending order,
        ties by lower id; top_ids [L, K] int32, the best tokens in that order; top [L, K] float32. In a row
        with NaN ranks and top_ids are any.
    """
    assert scores.dtype == torch.float32 and token_ids.dtype == torch.int64, f"{scores.dtype=}"
    assert token_ids.shape == scores.shape[:1] and num_top >= 0, f"{token_ids.shape=} {num_top=}"
    return backend(__package__, scores.device).run(scores, token_ids, min(num_top, scores.shape[1]), FLOOR)
