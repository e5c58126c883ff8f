"""All entries that a row sees, for rows that see few."""

from __future__ import annotations

import torch
from torch import Tensor

from tilelang_ops.common.dispatch import backend


def visible_entries(num_visible: Tensor, k: int) -> Tensor:
    """Entries `0 ... num_visible - 1` of each row, -1 behind them.

    Args:
        num_visible: [n] int32, at most `k`.
        k: columns.

    Returns:
        [n, k] int32.
    """
    assert num_visible.dim() == 1 and k > 0, f"{num_visible.shape=} {k=}"
    if num_visible.numel() == 0:
        return torch.empty(0, k, dtype=torch.int32, device=num_visible.device)
    return backend(__package__, num_visible.device).run(num_visible, k)
