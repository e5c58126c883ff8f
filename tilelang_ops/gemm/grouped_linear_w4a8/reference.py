"""Torch meaning of `grouped_linear_w4a8`."""

from __future__ import annotations

import torch
from torch import Tensor

from tilelang_ops.common.expert_packing import unpack_experts
from tilelang_ops.common.row_codes import RowCodes, decode_units


def run(
    rows: RowCodes,
    weights: Tensor,
    references: Tensor,
    offsets: Tensor,
    columns: int,
    codes: Tensor | None = None,
) -> Tensor:
    x = decode_units(rows.codes, rows.scales)
    unpacked = unpack_experts(weights, references)[:, :columns, : x.shape[1]]
    bounds = offsets.tolist()
    out = torch.zeros(x.shape[0], columns, dtype=torch.bfloat16, device=x.device)
    for weight, first, end in zip(unpacked, bounds, bounds[1:], strict=False):
        out[first:end] = (x[first:end] @ weight.T).bfloat16()
    return out
