"""The best entries of each row, in ascending order."""

from __future__ import annotations

import torch
from torch import Tensor

from tilelang_ops.common.dispatch import backend


def select_entries(scores: Tensor, k: int) -> Tensor:
    """The `k` largest scores of each row, ties to the lower column, as ascending columns.

    Args:
        scores: [n, width] float32; -inf is never chosen. The width does not change the result.
        k: entries per row.

    Returns:
        [n, k] int32, -1 behind the last one where fewer than `k` can be chosen.
    """
    assert scores.dim() == 2 and k > 0, f"{scores.shape=} {k=}"
    if scores.numel() == 0:
        return torch.full((scores.shape[0], k), -1, dtype=torch.int32, device=scores.device)
    return backend(__package__, scores.device).run(scores, k)
