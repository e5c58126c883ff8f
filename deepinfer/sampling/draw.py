"""Drawing one token per row: the argmax of score + Gumbel noise, which follows softmax(scores) exactly.

The perturbed score of a token is float32(score + g): one addition, rounded once. Ties go to the lowest id.
Two ways lead to the same bits: pairs of (row, token) for rows that truncation left few tokens of, and whole
rows otherwise, where a cheap bound sorts out nearly all tokens before any logarithm is taken.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.sampling.philox import Domain, gumbel, pair_words, row_words

# Rows whose tokens survive with less than this share go through pairs: one pair costs four words.
PAIR_SHARE = 1 / 6
# Philox calls (four tokens each) of whole rows computed at once: their words stay in the CPU's cache.
GROUPS_AT_ONCE = 1 << 14


def gumbel_argmax(scores: Tensor, seeds: Tensor, index: Tensor, domain: int = Domain.CHOICE) -> Tensor:
    """Draws a token from softmax(scores) per row; -inf marks impossible tokens.

    Args:
        scores: [C, V] float32, finite or -inf.
        seeds, index: [C] int64, seed (bit pattern) and index of the token that each row generates.
        domain: the noise stream.

    Returns:
        [C] int64 token ids; 0 for a row without a possible token (or with NaN in it).
    """
    num_rows, vocab_size = scores.shape
    possible = scores > -torch.inf
    if num_rows == 0 or int(possible.sum()) < PAIR_SHARE * scores.numel():
        return _argmax_of_pairs(scores, possible.nonzero(), seeds, index, domain)
    step = max(1, GROUPS_AT_ONCE // ((vocab_size + 3) // 4))
    parts = []
    for start in range(0, num_rows, step):
        rows = slice(start, start + step)
        pairs = _candidates(scores[rows], seeds[rows], index[rows], domain)
        parts.append(_argmax_of_pairs(scores[rows], pairs, seeds[rows], index[rows], domain))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _candidates(scores: Tensor, seeds: Tensor, index: Tensor, domain: int) -> Tensor:
    """[N, 2] int64 (row, token) pairs, ascending, among which each row's winner is.

    With b the perturbed score of the likeliest token, a winner has score + g >= b. As -log1p(-u) >= u, its
    noise is at most -log(u), so u <= exp(score - b): one exponential per token instead of two logarithms.
    """
    top, token = scores.max(dim=-1)
    bound = top + gumbel(pair_words(seeds, index, token, domain))
    slack = 1e-3 + 1e-6 * bound.abs()  # covers the rounding of every float32 step here
    limit = torch.exp(scores - (bound - slack)[:, None])
    words = row_words(seeds, index, scores.shape[1], domain)
    return (words.float().add_(0.5) <= limit.mul_(2.0**32)).nonzero()


def _argmax_of_pairs(scores: Tensor, pairs: Tensor, seeds: Tensor, index: Tensor, domain: int) -> Tensor:
    """The best token among each row's pairs ([N, 2] int64); maxima and minima do not depend on order."""
    num_rows, vocab_size = scores.shape
    rows, tokens = pairs.unbind(-1)
    perturbed = scores[rows, tokens] + gumbel(pair_words(seeds[rows], index[rows], tokens, domain))
    best = perturbed.new_full((num_rows,), -torch.inf).scatter_reduce_(0, rows, perturbed, "amax")
    wins = perturbed == best[rows]
    lowest = tokens.new_full((num_rows,), vocab_size)
    lowest.scatter_reduce_(0, rows[wins], tokens[wins], "amin")
    return torch.where(lowest < vocab_size, lowest, 0)
