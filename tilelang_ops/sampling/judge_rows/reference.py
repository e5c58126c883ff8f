"""Torch meaning of `judge_rows`."""

from __future__ import annotations

import torch
from torch import Tensor

from tilelang_ops.sampling.judge_rows.op import NO_TOKEN, NUMERICS


def run(token_ids: Tensor, best: Tensor, outside: Tensor | None, sound_ids: Tensor, faults: Tensor) -> None:
    raw = best if outside is None else torch.maximum(best, outside)
    found = torch.where(best == -torch.inf, NO_TOKEN, 0)
    found = torch.where(raw.abs() < torch.inf, found, NUMERICS)
    faults.copy_(found)
    sound_ids.copy_(torch.where(found == 0, token_ids, 0))
