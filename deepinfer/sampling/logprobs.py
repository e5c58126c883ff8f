"""Log-probabilities of given tokens and of the most likely ones, from rows of scores.

The same function serves sampled tokens and the scoring of given ones (prompts, golden tokens), so the two
agree bit by bit. What the scores are is the caller's choice; an engine uses one `LogprobsMode` throughout.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

from tilelang_ops import sampling as ops

FLOOR = -9999.0  # log-probability of the impossible
MASK32 = 0xFFFFFFFF


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
    if scores.device.type != "cpu":
        return Logprobs(*ops.gather_logprobs(scores, token_ids, num_top))
    # + 0.0 makes one zero of both, which the order by bits below would tell apart.
    scores = scores + 0.0
    chosen = scores.gather(-1, token_ids[:, None])
    top = scores.amax(dim=-1, keepdim=True)
    log_total = torch.exp(scores - top).sum(dim=-1, keepdim=True, dtype=torch.float64).log() + top.double()
    order = _top_ids(scores, min(num_top, scores.shape[1]))
    return Logprobs(
        chosen=_normalise(chosen, log_total).squeeze(-1),
        ranks=_ranks(scores, chosen, token_ids),
        top_ids=order.int(),
        top=_normalise(scores.gather(-1, order), log_total),
    )


def _normalise(scores: Tensor, log_total: Tensor) -> Tensor:
    """float32 log-probabilities in [-9999, 0]; a row without any possible token gives -9999."""
    values = (scores.double() - log_total).float()
    return values.nan_to_num(nan=FLOOR, neginf=FLOOR).clamp_(FLOOR, 0.0)


def _ranks(scores: Tensor, chosen: Tensor, token_ids: Tensor) -> Tensor:
    """[L] int32, 1 + the number of tokens that come before each row's token, ties by lower id."""
    ranks = (scores > chosen).sum(dim=-1)
    tied = ((scores >= chosen).sum(dim=-1) - ranks > 1).nonzero().squeeze(-1)
    if tied.shape[0]:
        ids = torch.arange(scores.shape[1], device=scores.device)
        equal = scores[tied] == chosen[tied]
        ranks[tied] += (equal & (ids < token_ids[tied, None])).sum(dim=-1)
    return (ranks + 1).int()


def _top_ids(scores: Tensor, count: int) -> Tensor:
    """[L, count] int64 ids of the best scores, descending, equal scores by ascending id.

    For tokens not below a row's count-th best value, score and id make one 64-bit key: the order is total,
    and no library's rule for ties matters.
    """
    num_rows, vocab_size = scores.shape
    if count == 0 or num_rows == 0:
        return scores.new_empty((num_rows, count), dtype=torch.int64)
    last = torch.topk(scores, count, dim=-1).values[:, -1:]
    rows, ids = (scores >= last).nonzero(as_tuple=True)
    bits = scores[rows, ids].view(torch.int32).long()
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)  # order of the floats as order of the integers
    keys = (ordered << 32) | (MASK32 - ids)
    lengths = torch.bincount(rows, minlength=num_rows)
    place = torch.arange(rows.shape[0], device=rows.device) - (lengths.cumsum(0) - lengths)[rows]
    width = max(count, int(lengths.max()))
    table = keys.new_full((num_rows, width), torch.iinfo(torch.int64).min)
    table[rows, place] = keys
    best = torch.topk(table, count, dim=-1).values
    # A row with NaN has no keys; its ids mean nothing but have to exist.
    return (MASK32 - (best & MASK32)).clamp_(max=vocab_size - 1)
