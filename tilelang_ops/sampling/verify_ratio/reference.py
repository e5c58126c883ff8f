"""Torch meaning of `verify_ratio`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tilelang_ops.common.noise import log, pair_words, uniform
from tilelang_ops.sampling.draw_tokens import reference as draw_reference
from tilelang_ops.sampling.truncate_scores.reference import exp_mass
from tilelang_ops.sampling.verify_ratio.op import Streams


def run(
    target: Tensor,
    draft: Tensor | None,
    draft_rows: Tensor | None,
    draft_ids: Tensor,
    seeds: Tensor,
    token_index: Tensor,
    streams: Streams,
    draw: Callable[[Tensor, Tensor, Tensor, int], Tensor] = draw_reference.run,
) -> tuple[Tensor, Tensor]:
    """`draw` is `draw_tokens`, by a faster way where there is one."""
    passed, token_ids = torch.zeros_like(draft_ids, dtype=torch.bool), draft_ids.clone()
    fresh = (draft_ids < 0).nonzero().squeeze(-1)
    if fresh.shape[0]:
        token_ids[fresh] = draw(target[fresh], seeds[fresh], token_index[fresh], streams.fresh).int()
    tested = (draft_ids >= 0).nonzero().squeeze(-1)
    if tested.shape[0] == 0:
        return passed, token_ids
    seeds, token_index, drafts = seeds[tested], token_index[tested], draft_ids[tested].long()[:, None]
    p, _ = _probabilities(target[tested])
    q = torch.zeros_like(p).scatter_(-1, drafts, 1.0)
    if draft is not None:
        drawn_from = draft[tested if draft_rows is None else draft_rows[tested]]
        probabilities, is_whole = _probabilities(drawn_from)
        q = torch.where(is_whole, probabilities, q)
    coin = uniform(pair_words(seeds, token_index, torch.zeros_like(seeds), streams.accept))[:, None]
    p_of_draft, q_of_draft = p.gather(-1, drafts), q.gather(-1, drafts)
    accepts = ((q_of_draft > 0) & (p_of_draft > coin * q_of_draft)).squeeze(-1)
    passed[tested] = accepts
    refused = (~accepts).nonzero().squeeze(-1)
    if refused.shape[0]:
        rest = p[refused] - q[refused]
        scores = torch.where(rest > 0, log(rest.clamp(min=2.0**-80)).float(), -torch.inf)
        is_empty = (rest <= 0).all(dim=-1, keepdim=True)
        rows = tested[refused]
        scores = torch.where(is_empty, target[rows], scores)
        token_ids[rows] = draw(scores, seeds[refused], token_index[refused], streams.residual).int()
    return passed, token_ids


def _probabilities(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Float64 probabilities, 0 in rows that are not whole, and [R, 1] bool which are."""
    top = scores.amax(dim=-1, keepdim=True)
    is_whole = top.isfinite()
    mass = exp_mass(torch.where(is_whole, scores - top, -torch.inf))
    return mass.double() / mass.sum(dim=-1, keepdim=True).clamp(min=1).double(), is_whole
