"""Window and selected records of every row as one list, for pools that lie behind each other."""

from __future__ import annotations

import torch
from torch import Tensor

from tilelang_ops.common.dispatch import backend


def concat_index(window: Tensor, selected: Tensor, window_offset: int, selected_offset: int) -> Tensor:
    """`[window + window_offset, selected + selected_offset]` row by row; -1 stays -1.

    Args:
        window: [n, w] int32 records of one pool.
        selected: [n, k] int32 records of another.
        window_offset, selected_offset: where the pools' records begin in the joined one.

    Returns:
        [n, w + k] int32.
    """
    assert window.shape[0] == selected.shape[0], f"{window.shape=} {selected.shape=}"
    if window.shape[0] == 0:
        width = window.shape[1] + selected.shape[1]
        return torch.empty(0, width, dtype=torch.int32, device=window.device)
    return backend(__package__, window.device).run(window, selected, window_offset, selected_offset)
