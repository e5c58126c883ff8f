"""Torch meaning of `start_streams`."""

from __future__ import annotations

import torch
from torch import Tensor


def run(table: Tensor, token_ids: Tensor, num_streams: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    rows = table.index_select(0, token_ids).to(dtype)
    pre = torch.zeros(rows.shape[0], num_streams, device=rows.device)
    pre[:, 0] = 1.0
    return rows.unsqueeze(1).repeat(1, num_streams, 1), pre
