"""Torch meaning of `last_tokens`."""

from __future__ import annotations

import torch
from torch import Tensor


def run(
    token_ids: Tensor, total_lens: Tensor, seqlens_k: Tensor, row_offsets: Tensor, width: int
) -> tuple[Tensor, Tensor, Tensor]:
    samples = (total_lens == seqlens_k) & (row_offsets.diff() > 0)
    final = (row_offsets[1:] - 1).clamp(min=0)
    last = torch.nn.functional.pad(token_ids, (0, 1))[final.long()]  # there may be no row
    emitted = torch.where(samples, last, 0)[:, None]
    return torch.nn.functional.pad(emitted, (0, width - 1)), samples.int(), final
