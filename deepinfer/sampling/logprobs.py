"""Log-probabilities of given tokens and of the most likely ones, from rows of scores.

The same function serves sampled tokens and the scoring of given ones (prompts, golden tokens), so the two
agree bit by bit. What the scores are is the caller's choice; an engine uses one `LogprobsMode` throughout.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

FLOOR = -9999.0  # log-probability of the impossible


class LogprobsMode(StrEnum):
    """Which distribution log-probabilities describe."""

    RAW = "raw"
    """The model's own: softmax of the untouched logits."""
    TEMPERATURE = "temperature"
    """After penalties, bias, masks and temperature; a greedy request counts as temperature 1."""
    PROCESSED = "processed"
    """What the token is drawn from: after min-p, top-k and top-p too, renormalised. A greedy request puts all
    mass on the largest logit, so its choice reports 0."""


@dataclass(frozen=True)
class Logprobs:
    """Log-probabilities of L rows, floored at -9999."""

    chosen: Tensor  # [L] float32, of the given token
    ranks: Tensor  # [L] int32, 1 + tokens that come before it in descending order, ties by lower id
    top_ids: Tensor  # [L, K] int32, most likely tokens in that order
    top: Tensor  # [L, K] float32


def gather_logprobs(scores: Tensor, token_ids: Tensor, num_top: int) -> Logprobs:
    """Log-softmax of each row at a token and at its `num_top` best ones.

    Args:
        scores: [L, V] float32, -inf where impossible.
        token_ids: [L] int64.
        num_top: K' >= 0; K = min(K', V).
    """
    # + 0.0 makes one zero of both, which the order by bits below would tell apart.
    scores = scores + 0.0
    chosen = scores.gather(-1, token_ids[:, None])
    ids = torch.arange(scores.shape[1], device=scores.device)
    ahead = (scores > chosen) | ((scores == chosen) & (ids < token_ids[:, None]))
    top = scores.amax(dim=-1, keepdim=True)
    log_total = torch.exp(scores - top).sum(dim=-1, keepdim=True, dtype=torch.float64).log() + top.double()
    order = _top_ids(scores, min(num_top, scores.shape[1]))
    return Logprobs(
        chosen=_normalise(chosen, log_total).squeeze(-1),
        ranks=ahead.sum(dim=-1, dtype=torch.int32) + 1,
        top_ids=order.int(),
        top=_normalise(scores.gather(-1, order), log_total),
    )


def _normalise(scores: Tensor, log_total: Tensor) -> Tensor:
    """float32 log-probabilities in [-9999, 0]; a row without any possible token gives -9999."""
    values = (scores.double() - log_total).float()
    return values.nan_to_num(nan=FLOOR, neginf=FLOOR).clamp_(FLOOR, 0.0)


def _top_ids(scores: Tensor, count: int) -> Tensor:
    """[L, count] int64 ids of the best scores, descending, equal scores by ascending id.

    Score and id make one 64-bit key, so the order is total and no library's rule for ties matters.
    """
    if count == 0:
        return scores.new_empty((scores.shape[0], 0), dtype=torch.int64)
    bits = scores.view(torch.int32).long()
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)  # order of the floats as order of the integers
    ids = torch.arange(scores.shape[1], device=scores.device)
    keys = (ordered << 32) | (0xFFFFFFFF - ids)
    return 0xFFFFFFFF - (torch.topk(keys, count, dim=-1).values & 0xFFFFFFFF)
