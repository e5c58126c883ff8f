"""From the model's logits to the distribution that is sampled: edits of single tokens, then truncation.

Order: penalties, bias, masks | temperature | min-p, top-k, top-p. Every result is a pure function of a row's
own values, never of the other rows or of their number: a row alone and in a batch agree bit by bit.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.ops.cpu import context
from deepinfer.sampling.inputs import SamplingInputs
from tilelang_ops.sampling import (
    add_to_logits,
    apply_penalties,
    apply_token_bitmask,
    keep_listed,
    truncate_scores,
)


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
    history = inputs.penalty_rows, inputs.penalty_tokens, inputs.penalty_counts
    apply_penalties(edited, *history, inputs.repetition, inputs.frequency, inputs.presence)
    add_to_logits(edited, inputs.bias_rows, inputs.bias_tokens, inputs.bias_values)
    keep_listed(edited, inputs.allowed_rows, inputs.allowed_offsets, inputs.allowed_tokens)
    add_to_logits(edited, inputs.ban_rows, inputs.ban_tokens, None)
    if inputs.masks is not None:
        apply_token_bitmask(edited, inputs.masks.words, inputs.masks.rows)
    return edited


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
    if scores.device.type != "cpu":
        return truncate_scores(scores, top_k, top_p, min_p, out)
    assert out.is_contiguous(), f"{out.stride()=}"
    log_min_p = torch.log(min_p.double()).float()  # -inf when off
    scores = scores.contiguous()
    parameters = [tensor.contiguous() for tensor in (top_k, top_p, log_min_p)]
    addresses = [tensor.data_ptr() for tensor in (*parameters, out)]
    num_rows, vocab_size = scores.shape
    context().truncate(scores.data_ptr(), vocab_size, num_rows, vocab_size, *addresses)
    return out
