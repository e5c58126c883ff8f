"""Noise of the sampler: its streams. Words and noise themselves are `tilelang_ops.common.noise`'s.

No state and no batch enters, so a token's noise is the same in a plain step, a verify step and a drafter,
alone or in a batch.
"""

from __future__ import annotations

from enum import IntEnum

import torch
from torch import Tensor

from tilelang_ops.common import noise
from tilelang_ops.common.noise import pair_words, philox4x32, row_words, uniform

__all__ = ["Domain", "draft_domain", "gumbel", "pair_words", "philox4x32", "row_words", "uniform"]

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


def gumbel(words: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    """Gumbel noise of words, computed in `dtype` and rounded to float32.

    float64 is the definition, the same bits on every device. float32 stays within 1e-5 of it and serves to
    find candidates.
    """
    if dtype == torch.float64:
        return noise.gumbel(words)
    # log1p(-u) where u is small, log(1 - u) from the complement where 1 - u is small: no cancellation.
    small = words < _HALF
    below = (torch.where(small, words, _HALF).to(dtype) + 0.5) * 2.0**-32
    above = (torch.where(small, _HALF, 2**32 - words).to(dtype) - 0.5) * 2.0**-32
    return (-torch.log(-torch.where(small, torch.log1p(-below), torch.log(above)))).float()
