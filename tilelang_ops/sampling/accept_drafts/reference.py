"""Torch meaning of `accept_drafts`."""

from __future__ import annotations

import torch
from torch import Tensor


def run(
    token_ids: Tensor, draft_ids: Tensor, faults: Tensor, row_offsets: Tensor, width: int
) -> tuple[Tensor, Tensor, Tensor]:
    stands = (token_ids == draft_ids) & (draft_ids >= 0) & (faults == 0)
    first, end = row_offsets[:-1].long(), row_offsets[1:].long()
    place = torch.arange(width, device=token_ids.device)
    rows = first[:, None] + place
    inside = rows < end[:, None]
    rows = torch.minimum(rows, end[:, None] - 1)
    intact = (stands[rows] & inside).long().cumprod(1)
    count = intact.sum(1)  # drafts that stand
    emitted = torch.where((place <= count[:, None]) & inside, token_ids[rows], 0)
    return emitted, (count + 1).int(), (first + count).int()
