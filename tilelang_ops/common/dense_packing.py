"""Dense weights as the products in FP8 take them: E4M3 codes with a scale for 32 rows x 128 channels.

The largest scale of four groups of 32 channels becomes that of all; codes are rounded once more, which
changes values below 2^-6 of the scale alone, by 2^-10 of it at most (see `row_codes`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from tilelang_ops.common.numerics import E4M3, decode_e8m0
from tilelang_ops.common.packing import MAX_FP8_SCALE
from tilelang_ops.common.row_codes import UNIT

WEIGHT_ROWS = 32  # that share a scale
SCALE_COLUMNS = 4  # a row of scales has a multiple of these


def pack_units(codes: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Pack weights of E4M3 codes with a scale for 32 x 32.

    Args:
        codes: [copies, n, k] E4M3 or their bytes, k a multiple of 32.
        scales: [copies, ceil(n / 32), k / 32] uint8 E8M0.

    Returns:
        codes [copies, n, k] uint8, and scales [copies, ceil(k / 128), ceil(n / 32) and up to a multiple of 4]
        float32, 0 behind the last row.

    Raises:
        ValueError: a scale above 2^7, NaN among them.
    """
    if int(scales.max()) > MAX_FP8_SCALE:
        raise ValueError(f"FP8 scale byte {int(scales.max())}, at most {MAX_FP8_SCALE} (2^7) is exact")
    copies, n, k = codes.shape
    bottom, right = -n % WEIGHT_ROWS, -k % UNIT
    padded = torch.nn.functional.pad(codes.view(torch.uint8), (0, right, 0, bottom))
    # [copies, rows / 32, 32, units, groups, 32]
    values = padded.unflatten(2, (-1, UNIT // 32, 32)).unflatten(1, (-1, WEIGHT_ROWS))
    groups = torch.nn.functional.pad(scales, (0, -scales.shape[2] % 4)).unflatten(2, (-1, 4))
    is_zero = (values & 0x7F).amax((2, 5)) == 0  # what has no value sets no scale
    largest = groups.masked_fill(is_zero, 0).amax(3)
    factors = decode_e8m0(groups) / decode_e8m0(largest).unsqueeze(3)
    out = torch.empty_like(padded)
    for copy in range(copies):  # float32 values of one at a time
        exact = values[copy].view(E4M3).float() * factors[copy][:, None, :, :, None]
        out[copy] = exact.to(E4M3).view(torch.uint8).flatten(2).flatten(0, 1)
    unit_scales = decode_e8m0(largest).transpose(1, 2)
    unit_scales = torch.nn.functional.pad(unit_scales, (0, -unit_scales.shape[2] % SCALE_COLUMNS))
    return out[:, :n, :k].contiguous(), unit_scales.contiguous()


def unpack_units(codes: Tensor, scales: Tensor) -> Tensor:
    """Float32 weights [copies, n, k] of `pack_units`."""
    _, n, k = codes.shape
    by_rows = scales.transpose(1, 2).repeat_interleave(WEIGHT_ROWS, 1).repeat_interleave(UNIT, 2)
    return codes.view(E4M3).float() * by_rows[:, :n, :k]
