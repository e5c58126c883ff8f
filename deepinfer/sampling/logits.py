"""From the model's logits to the distribution that is sampled: edits of single tokens, then truncation.

Order: penalties, bias, masks | temperature | min-p, top-k, top-p. Every result is a pure function of a row's
own values, never of the other rows or of their number: a row alone and in a batch agree bit by bit.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from deepinfer.sampling.inputs import SamplingInputs

# Masses are integers, exp(score - max) in units of 2**-40: sums are exact, so a cut depends on no summation
# order. A vocabulary of 2**22 tokens stays below 2**63.
MASS_UNIT = 2.0**40
# Best scores that truncation looks at before it sorts whole rows; most cuts are found among them.
SHORT_PREFIX = 32


def edit_logits(logits: Tensor, inputs: SamplingInputs, banned: Tensor | None = None) -> Tensor:
    """Applies penalties, logit bias and masks.

    Args:
        logits: [R, V] float32, left as they are.
        inputs: parameters of the R rows.
        banned: [V] bool, tokens that no row may produce.

    Returns:
        [R, V] float32: `logits` itself when there is nothing to do, else a changed copy.
    """
    sparse = (inputs.penalty_rows, inputs.bias_rows, inputs.allowed_rows, inputs.ban_rows)
    if banned is None and not any(rows.shape[0] for rows in sparse):
        return logits
    edited = logits.clone() if banned is None else logits.masked_fill(banned, -torch.inf)
    if inputs.penalty_rows.shape[0]:
        _apply_penalties(edited, inputs)
    if inputs.bias_rows.shape[0]:
        place = inputs.bias_rows.long(), inputs.bias_tokens.long()
        edited[place] = edited[place] + inputs.bias_values
    if inputs.allowed_rows.shape[0]:
        _apply_allowed(edited, inputs)
    if inputs.ban_rows.shape[0]:
        edited[inputs.ban_rows.long(), inputs.ban_tokens.long()] = -torch.inf
    return edited


def _apply_penalties(logits: Tensor, inputs: SamplingInputs) -> None:
    """Repetition (prompt and output), then frequency and presence (output only), in place."""
    rows, tokens, counts = inputs.penalty_rows.long(), inputs.penalty_tokens.long(), inputs.penalty_counts
    values = logits[rows, tokens]
    repetition = inputs.repetition[rows]
    values = torch.where(values > 0, values / repetition, values * repetition)
    values = values - inputs.frequency[rows] * counts
    values = values - inputs.presence[rows] * (counts > 0)
    logits[rows, tokens] = values


def _apply_allowed(logits: Tensor, inputs: SamplingInputs) -> None:
    """Forbids every token outside a row's list, in place."""
    rows = inputs.allowed_rows.long()
    lengths = inputs.allowed_offsets.diff()
    forbidden = torch.ones(rows.shape[0], logits.shape[1], dtype=torch.bool, device=logits.device)
    owner = torch.repeat_interleave(lengths.long(), output_size=inputs.allowed_tokens.shape[0])
    forbidden[owner, inputs.allowed_tokens.long()] = False
    logits[rows] = logits[rows].masked_fill(forbidden, -torch.inf)


def truncate(scores: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Keeps each row's most likely tokens by min-p, then top-k, then top-p; ties stay by the lower id.

    min-p keeps score >= max + log(min_p). top-k keeps the k best of those. top-p keeps a token when the mass
    strictly before it, in descending order, is at most top_p times the mass of all tokens that the first two
    kept.

    Args:
        scores: [C, V] float32 after temperature, finite or -inf.
        top_k: [C] int32, -1 = off.  top_p, min_p: [C] float32, 1 and 0 = off.

    Returns:
        [C, V] float32: the scores, with -inf in place of the tokens that fell out.
    """
    num_kept, cut, found = _find_cut(scores, top_k, top_p, min_p, min(SHORT_PREFIX, scores.shape[1]))
    late = (~found).nonzero().squeeze(-1)
    if late.shape[0]:
        part = scores if late.shape[0] == scores.shape[0] else scores[late]
        num_kept[late], cut[late], _ = _find_cut(part, top_k[late], top_p[late], min_p[late], scores.shape[1])
    keep = scores >= cut[:, None]
    surplus = keep.sum(dim=-1) - num_kept
    tied = (surplus > 0).nonzero().squeeze(-1)
    if tied.shape[0]:
        equal = scores[tied] == cut[tied, None]
        place = equal.cumsum(dim=-1)
        keep[tied] &= ~equal | (place <= (place[:, -1] - surplus[tied])[:, None])
    return torch.where(keep, scores, -torch.inf)


def _find_cut(
    scores: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, prefix: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Looks for the cut among the `prefix` best scores of each row; every rule keeps a prefix of them.

    Only values are read, so the order among equal scores is immaterial.

    Returns:
        num_kept [C] int64 >= 1, the score of the last kept token [C] float32, and whether the prefix was long
        enough to know [C] bool.
    """
    whole = prefix == scores.shape[1]
    values = _sorted_descending(scores) if whole else torch.topk(scores, prefix, dim=-1).values
    floor = values[:, :1] + torch.log(min_p.double()).float()[:, None]  # -inf when min-p is off
    limit = ((values >= floor) & (values > -torch.inf)).sum(dim=-1)
    has_k = (top_k > 0) & (top_k <= limit)
    found = (limit < prefix) | has_k | whole
    limit = torch.where(has_k, top_k.long(), limit)
    num_kept = limit.clone()

    nucleus = (top_p < 1).nonzero().squeeze(-1)
    if nucleus.shape[0]:
        all_rows = nucleus.shape[0] == scores.shape[0]
        part = values if all_rows else values[nucleus]
        mass = _mass(part, part[:, :1])
        place = torch.arange(prefix, device=scores.device)
        inside = place < limit[nucleus, None]
        mass = mass.masked_fill_(~inside, 0)
        total = mass.sum(dim=-1)
        # Rows that go on beyond the prefix without a top-k take their mass from the whole row.
        beyond = ~found[nucleus] & (top_k[nucleus] < 0)
        for_total = beyond.nonzero().squeeze(-1)
        if for_total.shape[0]:
            rows = nucleus[for_total]
            row_scores = scores if rows.shape[0] == scores.shape[0] else scores[rows]
            row_mass = _mass(row_scores, values[rows, :1])
            total[for_total] = row_mass.masked_fill_(row_scores < floor[rows], 0).sum(dim=-1)
        threshold = (top_p[nucleus].double() * total.double()).floor().long()
        before = mass.cumsum(dim=-1) - mass
        count = (before <= threshold[:, None]).sum(dim=-1)  # beyond the limit it is the total, above
        num_kept[nucleus] = count
        found[nucleus] |= beyond & (count < prefix)
    num_kept.clamp_(min=1)
    return num_kept, values.gather(-1, (num_kept - 1)[:, None]).squeeze(-1), found


def _sorted_descending(scores: Tensor) -> Tensor:
    """The values of each row in descending order (on a CPU NumPy's vectorised sort is the fast one)."""
    if scores.device.type != "cpu":
        return torch.sort(scores, dim=-1, descending=True).values
    return torch.from_numpy(np.sort(scores.numpy(), axis=-1)).flip(-1)


def _mass(values: Tensor, top: Tensor) -> Tensor:
    """Integer masses exp(values - top) in units of 1 / MASS_UNIT, rounded down; 0 for -inf."""
    return torch.exp(values - top).mul_(MASS_UNIT).long()
