"""Verification of draft tokens: which drafts stand, and the token that follows them.

The rows of a sequence are consecutive: row j holds the target's distribution after drafts 1 ... j and tests
draft j + 1; the last row tests none. The accepted drafts are the leading run of rows whose test passed; the
first other row supplies one more token. Rows after it are dead.

    coupled   every row draws its token as plain decoding would; a draft stands iff it is that token.
              The output is the plain sampler's, token by token.
    ratio     a draft x stands with probability min(1, p(x) / q(x)); a refused one is replaced from
              max(p - q, 0). The output has the plain sampler's law.

The flag of a request picks draw and test together: the two do not mix. Greedy rows are coupled rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.sampling.draw import gumbel_argmax
from deepinfer.sampling.philox import Domain, pair_words, uniform


def leading_run(passed: Tensor, row_offsets: Tensor) -> Tensor:
    """Counts the rows at the beginning of each sequence that passed.

    Args:
        passed: [R] bool.
        row_offsets: [S + 1] integers, first row of each sequence; a sequence may have no row.

    Returns:
        [S] int32.
    """
    offsets = row_offsets.long()
    lengths = offsets.diff()
    failures = torch.nn.functional.pad((~passed).long().cumsum(0), (1, 0))  # [R + 1] failures before each row
    owner = torch.repeat_interleave(lengths, output_size=passed.shape[0])
    intact = failures[1:] == failures[offsets[:-1]][owner]
    count = torch.nn.functional.pad(intact.long().cumsum(0), (1, 0))
    return (count[offsets[1:]] - count[offsets[:-1]]).int()


def coupled_test(token_ids: Tensor, draft_ids: Tensor, faults: Tensor) -> Tensor:
    """Whether each row's draft is the token that the row drew itself.

    Args:
        token_ids: [R] int32 from `Sampler.sample`, forced tokens included.
        draft_ids: [R] int32, -1 where the row tests none.
        faults: [R] uint8; a faulty row has no token, so nothing stands behind it.

    Returns:
        [R] bool.
    """
    return (token_ids == draft_ids) & (draft_ids >= 0) & (faults == 0)


def ratio_verify(
    target: Tensor, draft: Tensor | None, draft_ids: Tensor, seeds: Tensor, token_index: Tensor
) -> tuple[Tensor, Tensor]:
    """Tests drafts by the ratio of their probabilities and draws each row's own token.

    All draws use streams of their own (`Domain.ACCEPT`, `RESIDUAL`, `FRESH`), independent of the one that the
    drafts were drawn from (`Domain.DRAFT`). Probabilities are compared in float64.

    Args:
        target: [R, V] float32 scores that the target samples from, after all transforms; -inf = impossible.
        draft: [R, V] float32 scores that the drafts were really drawn from; rows without a draft are ignored.
            None means that each draft was certain (proposals without probabilities).
        draft_ids: [R] int32, -1 where the row tests none.
        seeds, token_index: [R] int64.

    Returns:
        passed [R] bool, and token_ids [R] int32: the token to emit if the row is the first that did not pass:
        from the residual after a refused draft, afresh where there was none.
    """
    has_draft = draft_ids >= 0
    drafts = draft_ids.clamp(min=0).long()[:, None]
    log_p = torch.log_softmax(target.double(), dim=-1)
    if draft is None:
        log_q = torch.full_like(log_p, -torch.inf).scatter_(-1, drafts, 0.0)
    else:
        log_q = torch.log_softmax(draft.double(), dim=-1)
    p_of_draft = log_p.gather(-1, drafts).squeeze(-1)
    q_of_draft = log_q.gather(-1, drafts).squeeze(-1)
    coin = uniform(pair_words(seeds, token_index, torch.zeros_like(seeds), Domain.ACCEPT))
    passed = has_draft & (q_of_draft > -torch.inf) & (p_of_draft > coin.log() + q_of_draft)

    # A residual that vanishes (p equal to q up to rounding) is replaced by p, its limit.
    residual = (log_p.exp() - log_q.exp()).clamp_(min=0.0)
    is_empty = residual.sum(dim=-1, keepdim=True) == 0
    replacement = torch.where(is_empty, log_p, residual.log()).float()
    token_ids = torch.zeros_like(draft_ids)
    for rows, scores, domain in (
        ((has_draft & ~passed), replacement, Domain.RESIDUAL),
        (~has_draft, target, Domain.FRESH),
    ):
        index = rows.nonzero().squeeze(-1)
        drawn = gumbel_argmax(scores[index], seeds[index], token_index[index], domain)
        token_ids[index] = drawn.to(token_ids.dtype)
    return passed, token_ids
