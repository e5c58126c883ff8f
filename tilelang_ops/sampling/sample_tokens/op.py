"""Choose a token per row of logits: temperature, truncation and draw, or the largest logit."""

from __future__ import annotations

import torch
from torch import Tensor

from tilelang_ops.common.dispatch import backend


def sample_tokens(
    logits: Tensor,
    inv_temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    token_index: Tensor,
    domain: int = 0,
) -> tuple[Tensor, Tensor]:
    """Draws each row's token from softmax(logits * inv_temperature), cut by min-p, top-k and top-p.

    The token is the argmax of score + noise over what `truncate_scores` keeps, by `draw_tokens`; with an
    inverse temperature of 0 it is that of the logits. Ties go to the lowest id. The result is exact: equal
    logits give equal tokens on every device, in any batch.

    Args:
        logits: [R, V] float32, -inf where impossible.
        inv_temperature: [R] float32, 0 = greedy.
        top_k: [R] int32, off where <= 0 or >= V.
        top_p: [R] float32, off where >= 1.
        min_p: [R] float32, off where 0.
        seeds, token_index: [R] int64.
        domain: the noise stream, 0 ... 2^31 - 1.

    Returns:
        token_ids [R] int32, 0 where no logit is finite, or one is NaN or +inf; and best [R] float32, the
        largest logit, NaN where one is NaN.
    """
    num_rows = logits.shape[0]
    assert logits.dtype == torch.float32, f"{logits.dtype=}"
    for name, tensor, dtype in (
        ("inv_temperature", inv_temperature, torch.float32),
        ("top_k", top_k, torch.int32),
        ("top_p", top_p, torch.float32),
        ("min_p", min_p, torch.float32),
        ("seeds", seeds, torch.int64),
        ("token_index", token_index, torch.int64),
    ):
        assert tensor.shape == (num_rows,) and tensor.dtype == dtype, f"{name}: {tensor.shape} {tensor.dtype}"
    if num_rows == 0:
        return seeds.new_empty(0, dtype=torch.int32), logits.new_empty(0)
    run = backend(__package__, logits.device).run
    return run(logits, inv_temperature, top_k, top_p, min_p, seeds, token_index, domain)
