"""Torch meaning of `draft_rows`."""

from __future__ import annotations

import torch
from torch import Tensor


def run(
    emitted: Tensor,
    num_emitted: Tensor,
    final_rows: Tensor,
    positions: Tensor,
    output_rows: Tensor,
    state_slots: Tensor,
    inv_temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    token_index: Tensor,
    num_drafts: int,
    seqs: Tensor | None,
    first: int,
) -> tuple[Tensor, ...]:
    chosen = torch.arange(first, num_emitted.shape[0], device=emitted.device) if seqs is None else seqs.long()
    final = final_rows[chosen].clamp(0, output_rows.shape[0] - 1).long()
    last = (num_emitted[chosen] - 1).clamp(min=0).long()
    steps = torch.arange(1, num_drafts + 1, device=emitted.device)
    return (
        emitted[chosen].gather(1, last[:, None]).squeeze(1),
        positions[output_rows[final].long()] + 1,
        state_slots[chosen],
        *(p[final] for p in (inv_temperature, top_k, top_p, min_p, seeds)),
        token_index[final] + steps[:, None],
    )
