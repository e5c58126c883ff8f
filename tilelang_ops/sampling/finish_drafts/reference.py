"""Torch meaning of `finish_drafts`."""

from __future__ import annotations

import torch
from torch import Tensor

from tilelang_ops.common.numerics import sigmoid
from tilelang_ops.sampling.finish_drafts.op import MAX_LOGIT, NO_DRAFTS


def run(
    tokens: Tensor,
    logits: Tensor,
    temperatures: Tensor,
    offsets: Tensor,
    eos_token_id: int,
    drafts: Tensor,
    confidences: Tensor,
    kept_logits: Tensor,
    places: Tensor | None,
    first: int,
) -> None:
    chosen, num_seqs = tokens.t(), drafts.shape[0]
    is_end = chosen == eos_token_id
    own = sigmoid((logits / temperatures + offsets).clamp(-MAX_LOGIT, MAX_LOGIT))
    own = own.masked_fill(is_end.cumsum(1) - is_end.long() > 0, 0.0)
    seqs = torch.arange(num_seqs, device=drafts.device)
    if places is None:
        places = seqs - first
    is_proposed = (seqs >= first) & (places >= 0)
    for part, values in ((drafts, chosen), (confidences, own), (kept_logits, logits)):
        part.zero_()
        part[is_proposed] = values[places[is_proposed].long()]
    drafts[:first] = NO_DRAFTS
