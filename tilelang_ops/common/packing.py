"""Weights of the matrix products as the kernels read them: packed once, when a checkpoint is loaded.

A packed weight is int32 [copies, row_blocks, steps, words, 32]: a copy for each group or expert, in it
blocks of 64 weight rows and 64 channels, padded with zeros. Thread t of a warp group (warp t / 32, lane
t % 32) holds, of the 16 channels of an instruction, rows r and r + 8 of its block and channels c, c + 1,
c + 8 and c + 9:

    r = 16 * (t / 32) + (t % 32) / 4        c = 2 * (t % 4)

Its codes lie in words of its own, at [.., 32 * .. + t] of the block:

    MXFP4   17 x 32 words: 4 instructions x 128 threads; the eight codes of a word are four pairs, pair
            p = (row + 8) + 2 * (channel + 8), its low channel in the low half. In a half the bits (sign;
            exponent, mantissa) are 9; 2..0 of pair 0, 13; 6..4 of pair 1, 3; 12..10 of pair 2 (the sign in
            the other half), 15; 8, 7, 14 of pair 3. Then 32 words of scale bytes: word
            8 * (t / 32) + (t % 32) / 4 has channels 0..31 of rows r and r + 8, then channels 32..63.
    FP8     33 x 32 words: 4 instructions x 2 (channel + 8) x 128 threads; in a word the low half is the low
            channel, the high byte row r, the low byte row r + 8. Then 32 equal words of the block's four
            scale bytes: channels 0..31 of rows 0..31 and 32..63, then channels 32..63.

With `gated` weights block b has gate rows 32 b .. 32 b + 31, then the same rows of the up projection.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tilelang_ops.common.numerics import decode_e2m1, decode_e8m0

BLOCK = 64  # weight rows and channels of a packed block
MAX_MXFP4_SCALE = 128  # 2^1: beyond it the decoders' factor exceeds bfloat16
MAX_FP8_SCALE = 134  # 2^7


def pack_mxfp4(codes: Tensor, scales: Tensor, *, gated: bool = False) -> Tensor:
    """Pack experts' weights of E2M1 codes with a scale for 32 channels of a row.

    Args:
        codes: [copies, n, k / 2] uint8, the even channel in the low nibble; k a multiple of 32.
        scales: [copies, n, k / 32] uint8 E8M0.
        gated: rows 0 .. n/2 - 1 are the gate's, the others the up projection's; n a multiple of 64.

    Returns:
        [copies, ceil(n / 64), ceil(k / 64), 17, 32] int32.

    Raises:
        ValueError: a scale above 2^1, NaN among them.
    """
    if int(scales.max()) > MAX_MXFP4_SCALE:
        raise ValueError(f"MXFP4 scale byte {int(scales.max())}, at most {MAX_MXFP4_SCALE} (2^1) is exact")
    nibbles = torch.stack([codes & 15, codes >> 4], -1).flatten(-2)
    nibbles, scales = (_blocks(_interleave(t, gated), w) for t, w in ((nibbles, 64), (scales, 2)))
    # [copies, row_blocks, steps, warp 4, high 2, row 8, step 4, right 2, quad 4, pair 2]
    n = nibbles.unflatten(3, (4, 2, 8)).unflatten(6, (4, 2, 4, 2)).int()
    n = n.permute(0, 1, 2, 6, 3, 5, 8, 7, 4, 9)  # .. step, warp, row, quad, right, high, element
    sign, code = n >> 3, n & 7
    halves = [
        (sign[..., 0, 0, :] << 9) | code[..., 0, 0, :],
        (sign[..., 0, 1, :] << 13) | (code[..., 0, 1, :] << 4),
        (sign[..., 1, 0, :].flip(-1) << 3) | (code[..., 1, 0, :] << 10),
        (sign[..., 1, 1, :] << 15) | ((code[..., 1, 1, :] & 6) << 6) | ((code[..., 1, 1, :] & 1) << 14),
    ]
    half = halves[0] | halves[1] | halves[2] | halves[3]
    words = _word(half[..., 0], half[..., 1]).flatten(3).unflatten(3, (16, 32))
    s = (
        scales.unflatten(3, (4, 2, 8)).permute(0, 1, 2, 3, 5, 6, 4).contiguous()
    )  # .. warp, row, channels, high
    return torch.cat([words, s.flatten(3).view(torch.int32).unsqueeze(3)], 3)


def unpack_mxfp4(packed: Tensor, *, gated: bool = False) -> Tensor:
    """Float32 weights [copies, n, k] of `pack_mxfp4`, with the padding."""
    copies, row_blocks, steps = packed.shape[:3]
    words = packed[..., :16, :].reshape(copies, row_blocks, steps, 4, 4, 8, 4)
    half = torch.stack([words & 0xFFFF, (words >> 16) & 0xFFFF], -1)
    swapped = half.flip(-1)
    codes = [
        ((half >> 6) & 8) | (half & 7),
        ((half >> 10) & 8) | ((half >> 4) & 7),
        (swapped & 8) | ((half >> 10) & 7),
        ((half >> 12) & 8) | ((half >> 6) & 6) | ((half >> 14) & 1),
    ]
    n = torch.stack(codes, -2).unflatten(-2, (2, 2))  # .. step, warp, row, quad, right, high, element
    n = n.permute(0, 1, 2, 4, 8, 5, 3, 7, 6, 9).reshape(copies, row_blocks, steps, 64, 64)
    values = decode_e2m1((n[..., 0::2] | (n[..., 1::2] << 4)).to(torch.uint8))
    s = packed[..., 16, :].contiguous().view(torch.uint8).view(copies, row_blocks, steps, 4, 8, 2, 2)
    s = s.permute(0, 1, 2, 3, 6, 4, 5).reshape(copies, row_blocks, steps, 64, 2)
    return _rows(values * decode_e8m0(s).repeat_interleave(32, -1), gated)


def pack_fp8(codes: Tensor, scales: Tensor, *, gated: bool = False) -> Tensor:
    """Pack weights of E4M3 codes with a scale for 32 x 32.

    Args:
        codes: [copies, n, k] uint8 or float8_e4m3fn; k a multiple of 32.
        scales: [copies, ceil(n / 32), k / 32] uint8 E8M0.
        gated: as in `pack_mxfp4`.

    Returns:
        [copies, ceil(n / 64), ceil(k / 64), 33, 32] int32.

    Raises:
        ValueError: a scale above 2^7, NaN among them.
    """
    if int(scales.max()) > MAX_FP8_SCALE:
        raise ValueError(f"FP8 scale byte {int(scales.max())}, at most {MAX_FP8_SCALE} (2^7) is exact")
    rows = scales.repeat_interleave(32, 1)[:, : codes.shape[1]]
    codes, rows = (_blocks(_interleave(t, gated), w) for t, w in ((codes.view(torch.uint8), 64), (rows, 2)))
    c = codes.unflatten(3, (4, 2, 8)).unflatten(6, (4, 2, 4, 2)).int()
    c = c.permute(0, 1, 2, 6, 7, 3, 5, 8, 4, 9)  # .. step, right, warp, row, quad, high, element
    half = (c[..., 0, :] << 8) | c[..., 1, :]
    words = _word(half[..., 0], half[..., 1]).flatten(3).unflatten(3, (32, 32))
    s = rows[:, :, :, ::32].transpose(3, 4).flatten(3).contiguous().view(torch.int32)
    return torch.cat([words, s.unsqueeze(3).expand(-1, -1, -1, 1, 32)], 3)


def unpack_fp8(packed: Tensor, *, gated: bool = False) -> Tensor:
    """Float32 weights [copies, n, k] of `pack_fp8`, with the padding."""
    copies, row_blocks, steps = packed.shape[:3]
    words = packed[..., :32, :].reshape(copies, row_blocks, steps, 4, 2, 4, 8, 4)
    half = torch.stack([words & 0xFFFF, (words >> 16) & 0xFFFF], -1)
    c = torch.stack([half >> 8, half & 255], -2)  # .. step, right, warp, row, quad, high, element
    c = c.permute(0, 1, 2, 5, 8, 6, 3, 4, 7, 9).reshape(copies, row_blocks, steps, 64, 64)
    values = c.to(torch.uint8).view(torch.float8_e4m3fn).float()
    s = packed[..., 32, :1].contiguous().view(torch.uint8).view(copies, row_blocks, steps, 2, 2)
    scale = decode_e8m0(s.transpose(3, 4)).repeat_interleave(32, 3).repeat_interleave(32, 4)
    return _rows(values * scale, gated)


def split_float32(weight: Tensor) -> Tensor:
    """[n, k] float32 as three bfloat16 terms of decreasing size: [3 * n, k], their sum exact."""
    parts, rest = [], weight.float()
    for _ in range(3):
        parts.append(rest.bfloat16())
        rest = rest - parts[-1].float()
    return torch.cat(parts)


def _interleave(rows: Tensor, gated: bool) -> Tensor:
    """Blocks of 32 gate rows and 32 up rows in turn."""
    if not gated:
        return rows
    assert rows.shape[1] % 64 == 0, f"{rows.shape=}: gate and up rows are packed in groups of 32"
    return rows.unflatten(1, (2, -1, 32)).transpose(1, 2).flatten(1, 3)


def _blocks(rows: Tensor, columns: int) -> Tensor:
    """[copies, n, k] -> [copies, row_blocks, steps, 64, columns], padded with zeros."""
    bottom, right = -rows.shape[1] % BLOCK, -rows.shape[2] % columns
    padded = torch.nn.functional.pad(rows, (0, right, 0, bottom))
    return padded.unflatten(2, (-1, columns)).unflatten(1, (-1, BLOCK)).transpose(2, 3).contiguous()


def _rows(blocks: Tensor, gated: bool) -> Tensor:
    """[copies, row_blocks, steps, 64, 64] -> [copies, n, k], the reverse of `_blocks` and `_interleave`."""
    rows = blocks.transpose(2, 3).flatten(3).flatten(1, 2)
    return rows.unflatten(1, (-1, 2, 32)).transpose(1, 2).flatten(1, 3) if gated else rows


def _word(low: Tensor, high: Tensor) -> Tensor:
    return low | (high << 16)
