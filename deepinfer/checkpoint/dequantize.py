"""Stored weights to the float32 values that they mean, exactly; temporaries stay small beside the result.

E8M0 byte b     2 ** (b - 127); 255 is NaN and never occurs in a checkpoint
FP8 matrix      e4m3(W[r, c]) * scale[r // 32, c // 32]
FP4 matrix      byte [r, k] holds column 2k in its low nibble, 2k + 1 in its high one; times scale[r, c // 32]
Engram row      e4m3(W[row, c]) * scale[row, c // 32]
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

GROUP = 32  # columns (and, for dense FP8, rows) that share a scale
NAN_SCALE = 255  # the E8M0 byte that means NaN
NAN_E4M3 = 0x7F  # the E4M3 magnitude that means NaN, of either sign

_E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_E2M1 = torch.tensor([*_E2M1_MAGNITUDES, *(-value for value in _E2M1_MAGNITUDES)], dtype=torch.float32)
# A byte's two float32 values side by side, as one 64-bit item: unpacking is then a single look-up per byte.
_E2M1_PAIRS = torch.stack((_E2M1.repeat(16), _E2M1.repeat_interleave(16)), dim=1).view(torch.int64).flatten()
_E8M0 = torch.tensor([*(math.ldexp(1.0, b - 127) for b in range(NAN_SCALE)), math.nan], dtype=torch.float32)


def e8m0_values(scale: Tensor) -> Tensor:
    """Scale bytes (uint8, any shape) as float32 powers of two; byte 255 becomes NaN."""
    return _E8M0.index_select(0, scale.reshape(-1).int()).view(scale.shape)


def dequantize_fp8(data: Tensor, scale: Tensor, out: Tensor) -> None:
    """Dense FP8 rows into float32.

    Args:
        data: [rows, columns] float8_e4m3fn; the first row begins a block of 32 rows.
        scale: [ceil(rows / 32), ceil(columns / 32)] uint8.
        out: [rows, columns] float32, contiguous.
    """
    out.copy_(data)
    column_scale = _over_columns(scale, out.shape[1])  # [row blocks, columns]
    full = out.shape[0] // GROUP
    out[: full * GROUP].view(full, GROUP, -1).mul_(column_scale[:full, None, :])
    if out.shape[0] % GROUP:
        out[full * GROUP :].mul_(column_scale[full])


def dequantize_fp8_rows(data: Tensor, scale: Tensor, out: Tensor) -> None:
    """FP8 rows with a scale for each row and 32 columns (Engram) into float32.

    Args:
        data: [rows, columns] float8_e4m3fn.
        scale: [rows, ceil(columns / 32)] uint8.
        out: [rows, columns] float32, contiguous.
    """
    out.copy_(data)
    _scale_rows(out, scale)


def dequantize_fp4(data: Tensor, scale: Tensor, out: Tensor) -> None:
    """Packed FP4 rows with a scale for each row and 32 columns into float32.

    Args:
        data: [rows, columns / 2] int8 or uint8, two values a byte.
        scale: [rows, ceil(columns / 32)] uint8.
        out: [rows, columns] float32, contiguous.
    """
    codes = data.view(torch.uint8).reshape(-1).int()
    torch.index_select(_E2M1_PAIRS, 0, codes, out=out.view(torch.int64).view(-1))
    _scale_rows(out, scale)


def _scale_rows(out: Tensor, scale: Tensor) -> None:
    """Multiply each row's groups of 32 columns by the row's scales, in place."""
    rows, columns = out.shape
    if columns % GROUP == 0:
        out.view(rows, columns // GROUP, GROUP).mul_(e8m0_values(scale)[:, :, None])
    else:
        out.mul_(_over_columns(scale, columns))


def _over_columns(scale: Tensor, columns: int) -> Tensor:
    """[rows, groups] scale bytes -> [rows, columns] float32."""
    return e8m0_values(scale).repeat_interleave(GROUP, dim=1)[:, :columns]
