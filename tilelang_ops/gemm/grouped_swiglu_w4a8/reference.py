"""Torch meaning of `grouped_swiglu_w4a8`."""

from __future__ import annotations

import torch
from torch import Tensor

from tilelang_ops.common.expert_packing import unpack_experts
from tilelang_ops.common.numerics import silu
from tilelang_ops.common.row_codes import RowCodes, decode_units


def run(
    rows: RowCodes,
    weights: Tensor,
    references: Tensor,
    offsets: Tensor,
    factors: Tensor,
    limit: float,
    inner: int,
    codes: Tensor | None = None,
) -> RowCodes:
    x = decode_units(rows.codes, rows.scales)
    unpacked = unpack_experts(weights, references, gated=True)[..., : x.shape[1]]
    bounds = offsets.tolist()
    product = torch.zeros(x.shape[0], 2 * inner, dtype=torch.bfloat16, device=x.device)
    for weight, first, end in zip(unpacked, bounds, bounds[1:], strict=False):
        product[first:end] = (x[first:end] @ weight.T).bfloat16()
    gate, up = product.float().chunk(2, dim=1)
    out = silu(gate.clamp(max=limit).contiguous()) * up.clamp(-limit, limit) * factors.view(-1, 1)
    return RowCodes.encode(out.bfloat16())
