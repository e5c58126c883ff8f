"""From the model's logits to the distribution that is sampled: edits of single tokens, then truncation.

Order: penalties, bias, masks | temperature | min-p, top-k, top-p. Every result is a pure function of a row's
own values, never of the other rows or of their number: a row alone and in a batch agree bit by bit.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.ops.cpu import context
from deepinfer.sampling.inputs import SamplingInputs
from tilelang_ops.sampling import apply_token_bitmask


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
    if banned is None and inputs.masks is None and not any(rows.shape[0] for rows in sparse):
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
    if inputs.masks is not None:
        apply_token_bitmask(edited, inputs.masks.words, inputs.masks.rows)
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


def truncate(
    scores: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, out: Tensor | None = None
) -> Tensor:
    """Keeps each row's most likely tokens by min-p, then top-k, then top-p; ties stay by the lower id.

    min-p keeps score >= max + log(min_p). top-k keeps the k best of those. top-p keeps a token when the mass
    strictly before it, in descending order, is at most top_p times the mass of all tokens that the first two
    kept.

    Args:
        scores: [C, V] float32 after temperature, finite or -inf.
        top_k: [C] int32, -1 = off.  top_p, min_p: [C] float32, 1 and 0 = off.
        out: contiguous, where the result goes; may be `scores` itself. Allocated when None.

    Returns:
        [C, V] float32: the scores, with -inf in place of the tokens that fell out.
    """
    if out is None:
        out = scores.new_empty(scores.shape)
    log_min_p = torch.log(min_p.double()).float()  # -inf when off
    if scores.device.type != "cpu":
        return out.copy_(truncate_reference(scores, top_k, top_p, log_min_p))
    assert out.is_contiguous(), f"{out.stride()=}"
    scores = scores.contiguous()
    parameters = [tensor.contiguous() for tensor in (top_k, top_p, log_min_p)]
    addresses = [tensor.data_ptr() for tensor in (*parameters, out)]
    num_rows, vocab_size = scores.shape
    context().truncate(scores.data_ptr(), vocab_size, num_rows, vocab_size, *addresses)
    return out


def truncate_reference(scores: Tensor, top_k: Tensor, top_p: Tensor, log_min_p: Tensor) -> Tensor:
    """`truncate` by sorting whole rows; every rule keeps a prefix of the descending scores."""
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
    return torch.where((scores > cut) | (equal & is_early), scores, -torch.inf)


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
