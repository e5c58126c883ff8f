"""Keep each row's most likely tokens: min-p, then top-k, then top-p."""

from __future__ import annotations

import torch
from torch import Tensor

from tilelang_ops.common.dispatch import backend


def truncate_scores(
    scores: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, out: Tensor | None = None
) -> Tensor:
    """Keeps each row's most likely tokens by min-p, then top-k, then top-p; ties stay by the lower id.

    min-p keeps score >= max + log(min_p). top-k keeps the k best of those. top-p keeps a token when the mass
    strictly before it, in descending order, is at most top_p times the mass of all tokens that the first two
    kept. Masses are integers (`reference.exp_mass`), so every device keeps the same tokens.

    Args:
        scores: [R, V] float32 after temperature, finite or -inf.
        top_k: [R] int32, off where <= 0 or >= V.
        top_p, min_p: [R] float32, off where >= 1 and where 0.
        out: contiguous, where the result goes; may be `scores` itself. Allocated when None.

    Returns:
        [R, V] float32: the scores, with -inf in place of the tokens that fell out. A row with NaN in it keeps
        nothing.
    """
    if out is None:
        out = scores.new_empty(scores.shape)
    assert scores.dtype == out.dtype == torch.float32 and out.is_contiguous(), f"{out.dtype=} {out.stride()=}"
    assert top_k.shape == top_p.shape == min_p.shape == scores.shape[:1], f"{top_k.shape=} {top_p.shape=}"
    assert top_k.dtype == torch.int32 and top_p.dtype == min_p.dtype == torch.float32, f"{top_k.dtype=}"
    if scores.shape[0] > 0:
        backend(__package__, scores.device).run(scores, top_k, top_p, min_p, out)
    return out
