"""Noise of the sampler: Gumbel variables that are a pure function of (seed, token index, token id).

    w      = Philox4x32-10( counter = (v >> 2, t_lo, t_hi, domain), key = (S_lo, S_hi) )[v & 3]
    u      = (w + 1/2) * 2**-32                                  never 0 or 1
    g      = -log(-log(1 - u))                                   between -3.130 and 22.874

No state and no batch enters, so a token's noise is the same in a plain step, a verify step and a drafter,
alone or in a batch. Words are 32-bit numbers in int64 tensors: products wrap modulo 2**64, which keeps both
halves of a 32 x 32 bit product. The value of g is defined as the float64 formula rounded once to float32.
"""

from __future__ import annotations

from enum import IntEnum

import torch
from torch import Tensor

MASK32 = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_HALF = 2**31


class Domain(IntEnum):
    """Independent streams of one (seed, index); a draw names the one it uses."""

    CHOICE = 0  # the token itself: plain, coupled drafts and coupled verification
    ACCEPT = 1  # the coin of ratio verification
    RESIDUAL = 2  # the token after a refused draft
    FRESH = 3  # the token of a bonus row
    DRAFT = 4  # independent drafts for ratio verification, see `draft_domain`


def draft_domain(step: int) -> int:
    """The stream of the independent draft `step` (0, 1, ...) of a block.

    An index is drafted anew when the block before was refused below it. The second draft has another place in
    its block, and this keeps it independent of the first, on whose confidences verify lengths may depend.
    """
    return Domain.DRAFT + (step << 8)


def philox4x32(counter: tuple, key: tuple) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox4x32-10.

    Args:
        counter: four words, int64 tensors in [0, 2**32) (or ints) that broadcast with each other.
        key: two words, likewise.

    Returns:
        Four words, int64 tensors in [0, 2**32).
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        product0 = c0 * _MULTIPLIERS[0]
        product1 = c2 * _MULTIPLIERS[1]
        # An arithmetic shift drags the sign down; the mask after the xor removes it.
        c0 = ((product1 >> 32) ^ c1 ^ k0) & MASK32
        c1 = product1 & MASK32
        c2 = ((product0 >> 32) ^ c3 ^ k1) & MASK32
        c3 = product0 & MASK32
        k0 = (k0 + _KEY_STEPS[0]) & MASK32
        k1 = (k1 + _KEY_STEPS[1]) & MASK32
    return c0, c1, c2, c3


def _words(seeds: Tensor, index: Tensor, group: Tensor, domain: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The four words of token ids 4 * group ... 4 * group + 3; all arguments int64 and broadcastable."""
    counter = (group, index & MASK32, (index >> 32) & MASK32, torch.full_like(index, int(domain)))
    return philox4x32(counter, (seeds & MASK32, (seeds >> 32) & MASK32))


def row_words(seeds: Tensor, index: Tensor, num_tokens: int, domain: int = Domain.CHOICE) -> Tensor:
    """Words of the token ids 0 ... num_tokens - 1 for every row.

    Args:
        seeds, index: [R] int64, a row's seed (bit pattern) and token index.

    Returns:
        [R, num_tokens] int64 in [0, 2**32).
    """
    group = torch.arange((num_tokens + 3) // 4, device=seeds.device)
    words = _words(seeds[:, None], index[:, None], group[None, :], domain)
    return torch.stack(words, dim=-1).flatten(1)[:, :num_tokens]


def pair_words(seeds: Tensor, index: Tensor, token_ids: Tensor, domain: int = Domain.CHOICE) -> Tensor:
    """Words of single (row, token) pairs.

    Args:
        seeds, index, token_ids: [N] int64, seed and index of each pair's row, and its token.

    Returns:
        [N] int64 in [0, 2**32).
    """
    words = torch.stack(_words(seeds, index, token_ids >> 2, domain), dim=-1)
    return words.gather(-1, (token_ids & 3)[:, None]).squeeze(-1)


def uniform(words: Tensor) -> Tensor:
    """u in the open interval (0, 1) as float64, exact."""
    return (words.double() + 0.5) * 2.0**-32


def gumbel(words: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    """Gumbel noise of words, computed in `dtype` and rounded to float32.

    float64 is the definition. float32 stays within 1e-5 of it and serves to find candidates.
    """
    # log1p(-u) where u is small, log(1 - u) from the complement where 1 - u is small: no cancellation.
    small = words < _HALF
    below = (torch.where(small, words, _HALF).to(dtype) + 0.5) * 2.0**-32
    above = (torch.where(small, _HALF, 2**32 - words).to(dtype) - 0.5) * 2.0**-32
    return (-torch.log(-torch.where(small, torch.log1p(-below), torch.log(above)))).float()
