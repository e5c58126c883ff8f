"""Products of FP8 rows sorted by expert with the experts' MXFP4 weights, by their codes."""

from __future__ import annotations

import torch
from torch import Tensor

from tilelang_ops.common.dispatch import backend
from tilelang_ops.common.expert_packing import weight_codes_shape
from tilelang_ops.common.row_codes import SCALE_ROWS, RowCodes, scale_shape


def grouped_linear_w4a8(
    rows: RowCodes,
    weights: Tensor,
    references: Tensor,
    offsets: Tensor,
    columns: int,
    codes: Tensor | None = None,
) -> Tensor:
    """`out[r] = weights[expert of r] @ rows[r]`, rounded once.

    Sums of 128 channels are the tensor cores', with fewer bits than float32 has (doc/kernels.md); what adds
    them up is float32.

    Args:
        rows: m rows of `width` channels, m a multiple of 4 and width of 32; offsets[e] .. offsets[e + 1] - 1
            are expert e's.
        weights: [experts, ..] int32 and
        references: [experts, ..] float32 of `expert_packing.pack_experts`.
        offsets: [experts + 1] int32 multiples of 4, ascending from 0 to m at most; the output of rows behind
            is undefined.
        columns: weight rows of an expert before padding.
        codes: [experts, ..] uint8 of `expert_packing.weight_codes`, which many rows read in place of
            `weights`, with the same bits; None for none.

    Returns:
        [m, columns] bfloat16. A row's bits do not depend on the other rows.
    """
    check_operands(rows, weights, references, offsets, columns, codes)
    if rows.codes.shape[0] == 0:
        return torch.empty(0, columns, dtype=torch.bfloat16, device=offsets.device)
    return backend(__package__, offsets.device).run(rows, weights, references, offsets, columns, codes)


def check_operands(
    rows: RowCodes,
    weights: Tensor,
    references: Tensor,
    offsets: Tensor,
    columns: int,
    weight_codes: Tensor | None,
) -> None:
    """Assert what the products of experts have in common; arguments as in `grouped_linear_w4a8`."""
    codes, scales = rows.codes, rows.scales
    num_rows, width = codes.shape
    assert codes.dtype == torch.uint8 and codes.is_contiguous(), f"{codes.dtype} {codes.stride()=}"
    assert num_rows % SCALE_ROWS == 0 and width % 32 == 0, f"{codes.shape=}"
    assert scales.shape == scale_shape(num_rows, width), f"{codes.shape=} {scales.shape=}"
    assert scales.dtype == torch.float32 and scales.is_contiguous(), f"{scales.dtype} {scales.stride()=}"
    shape = (offsets.shape[0] - 1, -(-columns // 64), -(-width // 64), 17, 32)
    assert weights.shape == shape and offsets.dtype == torch.int32, f"{weights.shape=}, not {shape}"
    assert references.shape == (shape[0], shape[1] * 64), f"{references.shape=}"
    if weight_codes is not None:
        assert weight_codes.shape == weight_codes_shape(weights), f"{weight_codes.shape=} {weights.shape=}"
        assert weight_codes.dtype == torch.uint8 and weight_codes.is_contiguous(), f"{weight_codes.stride()=}"
