"""Torch meaning of `truncate_scores`: whole rows are sorted; every rule keeps a prefix."""

from __future__ import annotations

import torch
from torch import Tensor


def run(scores: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, out: Tensor) -> Tensor:
    log_min_p = torch.log(min_p.double()).float()  # -inf when off
    values = torch.sort(scores, dim=-1, descending=True).values
    top = values[:, :1]
    passing = (values >= top + log_min_p[:, None]) & (values > -torch.inf)
    limit = passing.sum(dim=-1)
    limit = torch.where(top_k > 0, top_k.long().minimum(limit), limit)
    place = torch.arange(scores.shape[1], device=scores.device)
    mass = torch.where(place < limit[:, None], exp_mass(values - top), 0)
    before = mass.cumsum(dim=-1) - mass
    threshold = (top_p.double() * mass.sum(dim=-1).double()).floor().long()
    nucleus = (before <= threshold[:, None]).sum(dim=-1).minimum(limit)
    num_kept = torch.where(top_p < 1, nucleus, limit)

    cut = values.gather(-1, (num_kept - 1).clamp(min=0)[:, None])
    equal = scores == cut
    surplus = (scores >= cut).sum(dim=-1) - num_kept  # tokens equal to the cut that have to go: the last ones
    is_early = equal.cumsum(dim=-1) <= (equal.sum(dim=-1) - surplus)[:, None]
    return out.copy_(torch.where((scores > cut) | (equal & is_early), scores, -torch.inf))


def exp_mass(x: Tensor) -> Tensor:
    """floor(exp(x) * 2**40) as int64, for x <= 0 in float32.

    The exponential is written out in operations that every device rounds alike, so that devices agree where a
    cut falls: exp(x) = 2**n * p(r), with n the integer nearest to x / ln 2 and r what is left. Integers make
    sums exact; a vocabulary of 2**22 tokens stays below 2**63.
    """
    x = x.clamp(min=-60.0)
    n = torch.round(x * 1.44269504)
    r = (x - n * 0.693359375) + n * 2.12194440e-4
    p = torch.full_like(r, 1.9875691500e-4)
    for coefficient in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        p = p * r + coefficient
    p = p * r * r + r + 1.0
    scale = ((n.int() + (127 + 40)) << 23).view(torch.float32)
    return (p * scale).long()
