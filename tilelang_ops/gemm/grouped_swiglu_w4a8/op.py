"""The first product of the experts by codes, with the gated activation behind it."""

from __future__ import annotations

import torch
from torch import Tensor

from tilelang_ops.common.dispatch import backend
from tilelang_ops.common.row_codes import RowCodes
from tilelang_ops.gemm.grouped_linear_w4a8.op import check_operands


def grouped_swiglu_w4a8(
    rows: RowCodes,
    weights: Tensor,
    references: Tensor,
    offsets: Tensor,
    factors: Tensor,
    limit: float,
    inner: int,
    codes: Tensor | None = None,
) -> RowCodes:
    """`silu(min(g, limit)) * clamp(u, -limit, limit) * factors[r]`, (g, u) = weights[expert of r] @ rows[r].

    The products round to bfloat16, the activation is float32 and rounds to bfloat16, which is encoded.

    Args:
        rows, offsets: as in `grouped_linear_w4a8`.
        weights, references: of `expert_packing.pack_experts(.., gated=True)`.
        factors: [m] float32, the routing weights of the sorted rows.
        limit: bound of the activations; infinity for none.
        inner: channels of the output, a multiple of 32.
        codes: as in `grouped_linear_w4a8`.

    Returns:
        m rows of `inner` channels. A row's bits do not depend on the other rows.
    """
    assert inner % 32 == 0 and limit > 0, f"{inner=} {limit=}"
    check_operands(rows, weights, references, offsets, 2 * inner, codes)
    num_rows = rows.codes.shape[0]
    assert factors.shape == (num_rows,) and factors.dtype == torch.float32, f"{factors.shape=} {num_rows=}"
    if num_rows == 0:
        return RowCodes.empty(0, inner, offsets.device)
    return backend(__package__, offsets.device).run(
        rows, weights, references, offsets, factors, limit, inner, codes
    )
