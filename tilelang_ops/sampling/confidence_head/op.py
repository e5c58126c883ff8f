"""The drafter's confidence in a draft, before and after calibration."""

from __future__ import annotations

import torch
from torch import Tensor

from tilelang_ops.common.dispatch import backend

MAX_LOGIT = 60.0


def confidence_head(
    hidden: Tensor, markov_rows: Tensor, weight: Tensor, temperatures: Tensor, offsets: Tensor
) -> tuple[Tensor, Tensor]:
    """logit = weight . [hidden ; markov row], and sigmoid(clamp(logit / temperature + offset, -60, 60)).

    Args:
        hidden: [k, n, H] bfloat16 or float32, states of the k draft positions of n sequences.
        markov_rows: [k, n, r] of the same type.
        weight: [H + r] of the same type, or float32.
        temperatures, offsets: [k] float32.

    Returns:
        logits and probabilities, [n, k] float32 each; the sum's order depends on the sizes H and r alone.
    """
    assert hidden.shape[:2] == markov_rows.shape[:2], f"{hidden.shape=} {markov_rows.shape=}"
    assert weight.shape == (hidden.shape[2] + markov_rows.shape[2],), f"{weight.shape=}"
    assert hidden.dtype == markov_rows.dtype, f"{hidden.dtype=} {markov_rows.dtype=}"
    assert weight.dtype in (hidden.dtype, torch.float32), f"{hidden.dtype=} {weight.dtype=}"
    assert temperatures.shape == offsets.shape == hidden.shape[:1], f"{temperatures.shape=} {offsets.shape=}"
    run = backend(__package__, hidden.device).run
    return run(hidden, markov_rows, weight, temperatures, offsets, MAX_LOGIT)
