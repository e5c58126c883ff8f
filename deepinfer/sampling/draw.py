"""Drawing one token per row: the argmax of score + Gumbel noise, which follows softmax(scores) exactly.

The perturbed score of a token is float32(score + g): one addition, rounded once. Ties go to the lowest id. A
cheap search names the few tokens of each row that can win; only theirs is the exact noise computed, always by
the same formula. So the search may be native code or torch and may differ in what it lets pass: the token is
the same bit by bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.ops.cpu import context
from deepinfer.sampling.philox import Domain, gumbel, pair_words, row_words
from tilelang_ops.sampling import draw_tokens

# Philox calls (four tokens each) that the torch search computes at once, to bound its memory.
GROUPS_AT_ONCE = 1 << 22


@dataclass(frozen=True)
class Candidates:
    """N pairs of row and token, with the token's random word; ascending."""

    rows: Tensor  # [N] int64
    tokens: Tensor  # [N] int64
    words: Tensor  # [N] int64


def gumbel_argmax(scores: Tensor, seeds: Tensor, index: Tensor, domain: int = Domain.CHOICE) -> Tensor:
    """Draws a token from softmax(scores) per row; -inf marks impossible tokens.

    Args:
        scores: [C, V] float32, finite or -inf.
        seeds, index: [C] int64, seed (bit pattern) and index of the token that each row generates.
        domain: the noise stream.

    Returns:
        [C] int64 token ids; 0 for a row without a possible token (or with NaN in it).
    """
    if scores.device.type != "cpu":
        return draw_tokens(scores, seeds, index, int(domain)).long()
    found = native_candidates(scores, seeds, index, domain)
    num_rows, vocab_size = scores.shape
    perturbed = scores[found.rows, found.tokens] + gumbel(found.words)
    best = perturbed.new_full((num_rows,), -torch.inf).scatter_reduce_(0, found.rows, perturbed, "amax")
    wins = perturbed == best[found.rows]
    lowest = found.tokens.new_full((num_rows,), vocab_size)
    lowest.scatter_reduce_(0, found.rows[wins], found.tokens[wins], "amin")
    return torch.where(lowest < vocab_size, lowest, 0)


def native_candidates(scores: Tensor, seeds: Tensor, index: Tensor, domain: int) -> Candidates:
    """Tokens among which each row's winner is, by the CPU kernel; arguments as for `gumbel_argmax`."""
    num_rows, vocab_size = scores.shape
    scores, seeds, index = scores.contiguous(), seeds.contiguous(), index.contiguous()
    # Sized for the worst case; pages that are not written cost nothing.
    tokens = torch.empty(num_rows, vocab_size, dtype=torch.int64)
    words = torch.empty(num_rows, vocab_size, dtype=torch.int64)
    counts = torch.zeros(num_rows, dtype=torch.int32)
    inputs = (scores.data_ptr(), vocab_size, num_rows, vocab_size, seeds.data_ptr(), index.data_ptr())
    outputs = (tokens.data_ptr(), words.data_ptr(), counts.data_ptr())
    context().gumbel_candidates(*inputs, int(domain), *outputs)
    width = int(counts.max()) if num_rows else 0
    rows, places = (torch.arange(width, dtype=torch.int32) < counts[:, None]).nonzero(as_tuple=True)
    return Candidates(rows, tokens[rows, places], words[rows, places])


def torch_candidates(scores: Tensor, seeds: Tensor, index: Tensor, domain: int) -> Candidates:
    """The same on any device.

    With b the perturbed score of the likeliest token, a winner has score + g >= b. As -log1p(-u) >= u, its
    noise is at most -log(u), so u <= exp(score - b): one exponential per token instead of two logarithms.
    """
    num_rows, vocab_size = scores.shape
    top, token = scores.max(dim=-1)
    bound = top + gumbel(pair_words(seeds, index, token, domain))
    slack = 1e-3 + 1e-6 * bound.abs()  # covers the rounding of every float32 step here
    limit = torch.exp(scores - (bound - slack)[:, None]).mul_(2.0**32)
    step = max(1, GROUPS_AT_ONCE // ((vocab_size + 3) // 4))
    parts = []
    for start in range(0, num_rows, step):
        part = slice(start, start + step)
        words = row_words(seeds[part], index[part], vocab_size, domain)
        rows, tokens = (words.float().add_(0.5) <= limit[part]).nonzero(as_tuple=True)
        parts.append((rows + start, tokens, words[rows, tokens]))
    if not parts:
        nothing = torch.empty(0, dtype=torch.int64, device=scores.device)
        return Candidates(nothing, nothing, nothing)
    return Candidates(*(torch.cat(columns) for columns in zip(*parts)))
