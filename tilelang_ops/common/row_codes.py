"""Rows of activations as the products in FP8 take them: E4M3 codes with one power of two for 128 channels.

Rows are rounded to E4M3 with a scale for 32 channels first (`numerics.encode_fp8`). A unit of 128 channels
then has the largest scale of its four groups, and a code is the rounded value over that scale, rounded to
E4M3 once more. That changes values below 2^-6 of the unit's scale alone, by 2^-10 of it at most: 2^-18.8 of
the largest value that the unit may hold, less than the tensor cores cut off.

    codes    [n, width]                         E4M3
    scales   [ceil(width / 128), n or more]     float32; a unit's scales of all rows lie side by side
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tilelang_ops.common.numerics import E4M3, MX_GROUP, decode_e8m0, decode_fp8, encode_fp8

UNIT = 128
SCALE_ROWS = 4  # a row of scales has a multiple of these: copy engines read from multiples of 16 bytes


@dataclass(frozen=True)
class RowCodes:
    """Rows by their codes.

    Attributes:
        codes: [n, width] uint8.
        scales: [ceil(width / 128), n rounded up to a multiple of 4] float32; those behind the last row are
            open.
    """

    codes: Tensor
    scales: Tensor

    @classmethod
    def empty(cls, num_rows: int, width: int, device: torch.device) -> RowCodes:
        """Memory for `num_rows` rows."""
        codes = torch.empty(num_rows, width, dtype=torch.uint8, device=device)
        return cls(codes, torch.empty(scale_shape(num_rows, width), dtype=torch.float32, device=device))

    @classmethod
    def encode(cls, rows: Tensor) -> RowCodes:
        """By `encode_units`."""
        return cls(*encode_units(rows))

    def values(self) -> Tensor:
        """[n, width] bfloat16, what they mean, exactly; by torch."""
        return decode_units(self.codes, self.scales).bfloat16()


def scale_shape(num_rows: int, width: int) -> tuple[int, int]:
    """Of the scales of rows."""
    return -(-width // UNIT), -(-num_rows // SCALE_ROWS) * SCALE_ROWS


def encode_units(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and scales of rows, which are rounded to E4M3 in groups of 32 on the way.

    Args:
        rows: [n, width] floating point, width a multiple of 32.

    Returns:
        codes [n, width] uint8, and scales [ceil(width / 128), n rounded up to a multiple of 4] float32, those
        behind the last row 0.
    """
    n, width = rows.shape
    padded = torch.nn.functional.pad(rows.float(), (0, -width % UNIT))
    codes, groups = encode_fp8(padded)
    units = decode_fp8(codes, groups).unflatten(1, (-1, UNIT))
    scales = decode_e8m0(groups.unflatten(1, (-1, UNIT // MX_GROUP)).amax(-1))  # zeros have the smallest
    codes = (units / scales.unsqueeze(-1)).to(E4M3).flatten(1)[:, :width].contiguous()
    return codes.view(torch.uint8), torch.nn.functional.pad(scales.T, (0, -n % SCALE_ROWS)).contiguous()


def decode_units(codes: Tensor, scales: Tensor) -> Tensor:
    """Float32 values [n, width] of `encode_units`'s codes and scales."""
    n, width = codes.shape
    return codes.view(E4M3).float() * scales[:, :n].T.repeat_interleave(UNIT, 1)[:, :width]
