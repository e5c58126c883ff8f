"""Record numbers of the window of every query."""

from __future__ import annotations

import torch
from torch import Tensor

from tilelang_ops.common.dispatch import backend


def window_index(positions: Tensor, base: Tensor, window: int, ring: int = 0) -> Tensor:
    """Records of positions `p - window + 1 ... p`, ascending; -1 in front where a position is negative.

    Args:
        positions: [n] int64, position p of each query.
        base: [n] int64; position t of the query's sequence is record `base + t % ring`, or `base + t` when
            `ring` is 0.
        window: keys per query.
        ring: records of a ring, or 0 for records that lie in a line.

    Returns:
        [n, window] int32.
    """
    assert positions.shape == base.shape, f"{positions.shape=} {base.shape=}"
    if positions.numel() == 0:
        return torch.empty(0, window, dtype=torch.int32, device=positions.device)
    return backend(__package__, positions.device).run(positions, base, window, ring)
