"""Torch meaning of `accept_drafts`."""

from __future__ import annotations

import torch
from torch import Tensor


def run(
    token_ids: Tensor,
    draft_ids: Tensor,
    faults: Tensor,
    row_offsets: Tensor,
    emitted: Tensor,
    num_emitted: Tensor,
    final_rows: Tensor,
) -> None:
    stands = (token_ids == draft_ids) & (draft_ids >= 0) & (faults == 0)
    first, end = row_offsets[:-1].long(), row_offsets[1:].long()
    place = torch.arange(emitted.shape[1], device=token_ids.device)
    rows = first[:, None] + place
    inside = rows < end[:, None]
    rows = torch.minimum(rows, end[:, None] - 1)
    intact = (stands[rows] & inside).long().cumprod(1)
    count = intact.sum(1)  # drafts that stand
    emitted.copy_(torch.where((place <= count[:, None]) & inside, token_ids[rows], 0))
    num_emitted.copy_(count + 1)
    final_rows.copy_(first + count)
