"""Probability of the tokens that are not more likely than a given one."""

from __future__ import annotations

import torch
from torch import Tensor

from tilelang_ops.common.dispatch import backend


def sum_smaller_probs(logprobs: Tensor, token_ids: Tensor) -> Tensor:
    """The distribution function at a token: the sum of exp(logprob) over logprobs that are not larger.

    Args:
        logprobs: [n, V] float32, -inf where impossible.
        token_ids: [n] int32, negative = none.

    Returns:
        [n] float32, summed in float64 in an order that a row alone decides; 0 where there is no token.
    """
    assert logprobs.dtype == torch.float32 and token_ids.dtype == torch.int32, f"{logprobs.dtype=}"
    assert token_ids.shape == logprobs.shape[:1], f"{token_ids.shape=} {logprobs.shape=}"
    if token_ids.shape[0] == 0:
        return logprobs.new_empty(0)
    return backend(__package__, logprobs.device).run(logprobs, token_ids)
