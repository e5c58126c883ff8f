"""MXFP4 weights of the experts as the products in FP8 read them: packed once, when a checkpoint is loaded.

A packed weight is int32 [copies, row_blocks, steps, 17, 32]: a copy for each expert, in it blocks of 64
weight rows and 64 channels, padded with zeros. Thread t of a warp group (warp t / 32, lane t % 32) holds, of
the 32 channels of an instruction, rows r and r + 8 of its block and channels c .. c + 3 and c + 16 .. c + 19:

    r = 16 * (t / 32) + (t % 32) / 4        c = 4 * (t % 4)

    words of codes     [instruction 2, row + 8, 128 threads]: bits 4k .. 4k + 2 are the magnitude of channel
                       c + k, those from 16 + 4k on of channel c + 16 + k; bits 7, 15, 23, 31 the signs of
                       the former, 3, 11, 19, 27 of the latter
    words of scales    8 * (t / 32) + (t % 32) / 4: bytes of rows r and r + 8, channels 0 .. 31, then of
                       channels 32 .. 63: exponents of scales, from 2^-5 of the row's reference on

The four words of a row in an instruction lie side by side.

A row has one reference, the power of two that its scales are between 2^-5 and 2^6 of, so that codes times
what a piece's byte says are E4M3 codes that are not subnormal. The scale of a piece of zeros means nothing.

With `gated` weights block b has gate rows 32 b .. 32 b + 31, then the same rows of the up projection.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tilelang_ops.common.numerics import E4M3, decode_e2m1
from tilelang_ops.common.packing import MAX_MXFP4_SCALE

BLOCK = 64  # weight rows and channels of a packed block
PIECE = 32  # channels of a scale
MAX_SHIFT, TOP_POWER = 11, 6  # from the lowest power to the highest, and the highest


class ScalesApartError(ValueError):
    """The scales of a weight's row differ by more than E4M3 holds."""


def pack_experts(codes: Tensor, scales: Tensor, *, gated: bool = False) -> tuple[Tensor, Tensor]:
    """Pack experts' weights of E2M1 codes with a scale for 32 channels of a row.

    Args:
        codes: [copies, n, k / 2] uint8, the even channel in the low nibble; k a multiple of 32.
        scales: [copies, n, k / 32] uint8 E8M0.
        gated: rows 0 .. n/2 - 1 are the gate's, the others the up projection's; n a multiple of 64.

    Returns:
        [copies, ceil(n / 64), ceil(k / 64), 17, 32] int32, and references [copies, ceil(n / 64) * 64]
        float32.

    Raises:
        ScalesApartError: scales of a row, pieces of zeros aside, are more than 2^11 apart.
        ValueError: a scale above 2^1, NaN among them.
    """
    if int(scales.max()) > MAX_MXFP4_SCALE:
        raise ValueError(f"MXFP4 scale byte {int(scales.max())}, at most {MAX_MXFP4_SCALE} (2^1) is exact")
    nibbles = torch.stack([codes & 15, codes >> 4], -1).flatten(-2)
    is_zero = (nibbles & 7).unflatten(-1, (-1, PIECE)).amax(-1) == 0
    tops = scales.int().masked_fill(is_zero, 0).amax(-1, keepdim=True).clamp(min=MAX_SHIFT)
    shifts = torch.where(is_zero, 0, scales.int() - tops + MAX_SHIFT)
    if int(shifts.min()) < 0:
        span = MAX_SHIFT - int(shifts.min())
        raise ScalesApartError(f"MXFP4 scales of a row are 2^{span} apart, at most 2^{MAX_SHIFT}")
    # [copies, row_blocks, steps, warp 4, high 2, row 8, instruction 2, right 2, quad 4, channel 4]
    n = _blocks(_interleave(nibbles, gated), BLOCK).unflatten(3, (4, 2, 8)).unflatten(6, (2, 2, 4, 4)).int()
    n = n.permute(0, 1, 2, 6, 4, 3, 5, 8, 7, 9)  # .. instruction, high, warp, row, quad, right, channel
    places = torch.arange(4, dtype=torch.int32, device=codes.device)
    low, high = ((n & 7) << 4 * places).sum(-1, dtype=torch.int32).unbind(-1)
    signs = ((n >> 3) << 8 * places).sum(-1, dtype=torch.int32)
    words = low | (high << 16) | (signs[..., 0] << 7) | (signs[..., 1] << 3)
    s = _blocks(_interleave(shifts.to(torch.uint8), gated), BLOCK // PIECE).unflatten(3, (4, 2, 8))
    s = (
        s.permute(0, 1, 2, 3, 5, 6, 4).flatten(3).contiguous().view(torch.int32)
    )  # .. warp, row, channels, high
    packed = torch.cat([words.flatten(3).unflatten(3, (16, 32)), s.unsqueeze(3)], 3)
    references = _interleave(torch.exp2((tops - (127 + TOP_POWER)).float()), gated).squeeze(-1)
    references = torch.nn.functional.pad(references, (0, -references.shape[1] % BLOCK), value=1.0)
    return packed, references.contiguous()


def unpack_experts(packed: Tensor, references: Tensor, *, gated: bool = False) -> Tensor:
    """Float32 weights [copies, n, k] of `pack_experts`, with the padding."""
    copies, row_blocks, steps = packed.shape[:3]
    words = packed[..., :16, :].reshape(copies, row_blocks, steps, 2, 2, 4, 8, 4)
    places = torch.arange(4, dtype=torch.int32, device=packed.device)
    code = torch.stack([words & 0xFFFF, (words >> 16) & 0xFFFF], -1).unsqueeze(-1)
    sign = torch.stack([words >> 7, words >> 3], -1).unsqueeze(-1)
    n = ((code >> 4 * places) & 7) | (((sign >> 8 * places) & 1) << 3)
    n = n.permute(0, 1, 5, 4, 6, 2, 3, 8, 7, 9).reshape(copies, row_blocks * BLOCK, steps * BLOCK)
    values = decode_e2m1((n[..., 0::2] | (n[..., 1::2] << 4)).to(torch.uint8))
    s = packed[..., 16, :].contiguous().view(torch.uint8).view(copies, row_blocks, steps, 4, 8, 2, 2)
    s = s.permute(0, 1, 3, 6, 4, 2, 5).reshape(copies, row_blocks * BLOCK, steps * 2)
    powers = torch.exp2(s.float() - (MAX_SHIFT - TOP_POWER)) * references.unsqueeze(-1)
    weights = values * powers.repeat_interleave(PIECE, -1)
    return weights.unflatten(1, (-1, 2, 32)).transpose(1, 2).flatten(1, 3) if gated else weights


def weight_codes(packed: Tensor) -> Tensor:
    """The E4M3 codes that programs decode of `pack_experts`'s weights, row by row as they are packed.

    Returns:
        [copies, ceil(n / 64) * 64, ceil(k / 64) * 64] uint8; a row times its reference is the weight's.
    """
    codes = torch.empty(*weight_codes_shape(packed), dtype=torch.uint8, device=packed.device)
    ones = torch.ones(1, codes.shape[1], device=packed.device)
    for blocks, out in zip(packed.split(1), codes, strict=True):  # float32 values of one expert at a time
        out[:] = unpack_experts(blocks, ones)[0].to(E4M3).view(torch.uint8)
    return codes


def weight_codes_shape(packed: Tensor) -> tuple[int, int, int]:
    """Of the result of `weight_codes`."""
    return packed.shape[0], packed.shape[1] * BLOCK, packed.shape[2] * BLOCK


def _interleave(rows: Tensor, gated: bool) -> Tensor:
    """Blocks of 32 gate rows and 32 up rows in turn."""
    if not gated:
        return rows
    assert rows.shape[1] % BLOCK == 0, f"{rows.shape=}: gate and up rows are packed in groups of 32"
    return rows.unflatten(1, (2, -1, 32)).transpose(1, 2).flatten(1, 3)


def _blocks(rows: Tensor, columns: int) -> Tensor:
    """[copies, n, k] -> [copies, row_blocks, steps, 64, columns], padded with zeros."""
    padded = torch.nn.functional.pad(rows, (0, -rows.shape[2] % columns, 0, -rows.shape[1] % BLOCK))
    return padded.unflatten(2, (-1, columns)).unflatten(1, (-1, BLOCK)).transpose(2, 3).contiguous()
