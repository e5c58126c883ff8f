"""Stored matrices to the float32 values that they mean, exactly; temporaries stay small beside the result.

    E8M0 byte b     2 ** (b - 127); 255 is NaN and never occurs in a checkpoint
    FP8 matrix      e4m3(W[r, c]) * scale[r // 32, c // 32]
    FP4 matrix      byte [r, k] holds columns 2k (low nibble) and 2k + 1 (high); times scale[r, c // 32]

The bit rules of the formats stand in `tilelang_ops.common.numerics`; rows of tables are widened where they
are gathered.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tilelang_ops.common.numerics import decode_e2m1, decode_e8m0

GROUP = 32  # columns (and, for dense FP8, rows) that share a scale
NAN_SCALE = 255  # the E8M0 byte that means NaN
NAN_E4M3 = 0x7F  # the E4M3 magnitude that means NaN, of either sign

# A byte's two float32 values side by side, as one 64-bit item: unpacking is then a single look-up per byte.
_E2M1_PAIRS = decode_e2m1(torch.arange(256, dtype=torch.uint8).view(256, 1)).view(torch.int64).flatten()


def dequantize_fp8(data: Tensor, scale: Tensor, out: Tensor) -> None:
    """Dense FP8 rows into float32.

    Args:
        data: [rows, columns] float8_e4m3fn; the first row begins a block of 32 rows.
        scale: [ceil(rows / 32), ceil(columns / 32)] uint8.
        out: [rows, columns] float32, contiguous.
    """
    out.copy_(data)
    rows, columns = out.shape
    column_scale = _over_columns(scale, columns)  # [row blocks, columns]
    full = rows // GROUP
    out[: full * GROUP].view(full, GROUP, columns).mul_(column_scale[:full, None, :])
    if rows % GROUP:
        out[full * GROUP :].mul_(column_scale[full])


def dequantize_fp4(data: Tensor, scale: Tensor, out: Tensor) -> None:
    """Packed FP4 rows with a scale for each row and 32 columns into float32.

    Args:
        data: [rows, columns / 2] int8 or uint8, two values a byte.
        scale: [rows, ceil(columns / 32)] uint8.
        out: [rows, columns] float32, contiguous.
    """
    codes = data.view(torch.uint8).reshape(-1).int()
    torch.index_select(_E2M1_PAIRS, 0, codes, out=out.view(torch.int64).view(-1))
    rows, columns = out.shape
    if columns % GROUP == 0:
        out.view(rows, columns // GROUP, GROUP).mul_(decode_e8m0(scale)[:, :, None])
    else:
        out.mul_(_over_columns(scale, columns))


def _over_columns(scale: Tensor, columns: int) -> Tensor:
    """[rows, groups] scale bytes -> [rows, columns] float32."""
    return decode_e8m0(scale).repeat_interleave(GROUP, dim=1)[:, :columns]
