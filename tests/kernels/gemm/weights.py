"""Random weights in the checkpoint's formats and rows of activations."""

from __future__ import annotations

import torch
from torch import Tensor

from tilelang_ops.common.numerics import decode_e8m0, decode_fp8, decode_mxfp4, encode_fp8


def rounded_rows(num_rows: int, width: int) -> Tensor:
    """Activations rounded to E4M3."""
    return decode_fp8(*encode_fp8(torch.randn(num_rows, width))).bfloat16()


def fp8_weight(copies: int, rows: int, width: int) -> tuple[Tensor, Tensor]:
    """Codes of every finite value, subnormals included, and scales of 32 x 32."""
    codes = torch.randint(0, 256, (copies, rows, width), dtype=torch.uint8)
    codes[(codes & 0x7F) == 0x7F] = 0
    return codes, torch.randint(110, 120, (copies, -(-rows // 32), width // 32), dtype=torch.uint8)


def mxfp4_weight(copies: int, rows: int, width: int) -> tuple[Tensor, Tensor]:
    """Codes of every value and scales of 32 channels."""
    codes = torch.randint(0, 256, (copies, rows, width // 2), dtype=torch.uint8)
    return codes, torch.randint(118, 126, (copies, rows, width // 32), dtype=torch.uint8)


def fp8_values(codes: Tensor, scales: Tensor) -> Tensor:
    """Float32 of `fp8_weight`."""
    by_rows = decode_e8m0(scales).repeat_interleave(32, 1)[:, : codes.shape[1]]
    return codes.view(torch.float8_e4m3fn).float() * by_rows.repeat_interleave(32, 2)


def mxfp4_values(codes: Tensor, scales: Tensor) -> Tensor:
    """Float32 of `mxfp4_weight`."""
    return decode_mxfp4(codes, scales)
