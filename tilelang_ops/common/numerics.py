"""Elementwise functions whose result depends on the value alone, and the number formats of the caches.

torch evaluates some functions (sigmoid, silu, softplus, tanh) differently in the vector body and in the
scalar tail of a CPU loop, so the bits of a value depend on where it stands in its tensor. The versions here
are built from exp, log1p and sqrt, which do not have that defect, and from exact operations.

Number formats (all encodings take the largest magnitude of a group, `amax`, in float32):

    format   group   scale                                     element
    FP8      32      E8M0: 2^ceil(log2(max(amax, 1e-4) / 448))  E4M3, one byte
    MXFP4    32      E8M0: 2^ceil(log2(max(amax, 6*2^-126) / 6)) E2M1, low nibble = even channel
    FP4      16      E4M3 nearest of max(amax, 6*2^-9) / 6      E2M1, low nibble = even channel

A scale is never zero. A group that holds a NaN gets a NaN scale, so that the fault reaches the reader.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
E2M1_MAX = 6.0
MX_GROUP = 32  # channels per E8M0 scale
FP4_GROUP = 16  # channels per E4M3 scale

_FP8_FLOOR = 1e-4
_MXFP4_FLOOR = 6.0 * 2.0**-126
_FP4_FLOOR = 6.0 * 2.0**-9


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x)), elementwise in float32."""
    return 1.0 / (1.0 + torch.exp(-x.float()))


def silu(x: Tensor) -> Tensor:
    """x * sigmoid(x), elementwise in float32."""
    x = x.float()
    return x / (1.0 + torch.exp(-x))


def softplus(x: Tensor) -> Tensor:
    """log(1 + exp(x)) without overflow, elementwise in float32."""
    x = x.float()
    return x.clamp(min=0.0) + torch.log1p(torch.exp(-x.abs()))


def encode_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Encode groups of 32 channels as E4M3 with E8M0 scales.

    Args:
        x: [..., n] floating point, n a multiple of 32.

    Returns:
        codes [..., n] uint8 and scales [..., n / 32] uint8.
    """
    groups = _groups(x, MX_GROUP)
    scale_bytes = _ceil_e8m0(_amax(groups, _FP8_FLOOR) / E4M3_MAX)
    scaled = (groups / decode_e8m0(scale_bytes).unsqueeze(-1)).clamp(-E4M3_MAX, E4M3_MAX)
    return scaled.to(E4M3).view(torch.uint8).view(x.shape), scale_bytes


def decode_fp8(codes: Tensor, scale_bytes: Tensor) -> Tensor:
    """Float32 values of `encode_fp8`'s bytes: [..., n] and [..., n / 32] uint8 -> [..., n]."""
    values = codes.contiguous().view(E4M3).float().unflatten(-1, (-1, MX_GROUP))
    return (values * decode_e8m0(scale_bytes).unsqueeze(-1)).flatten(-2)


def encode_mxfp4(x: Tensor) -> tuple[Tensor, Tensor]:
    """Encode groups of 32 channels as E2M1 with E8M0 scales.

    Args:
        x: [..., n] floating point, n a multiple of 32.

    Returns:
        packed codes [..., n / 2] uint8 and scales [..., n / 32] uint8.
    """
    groups = _groups(x, MX_GROUP)
    scale_bytes = _ceil_e8m0(_amax(groups, _MXFP4_FLOOR) / E2M1_MAX)
    return encode_e2m1((groups / decode_e8m0(scale_bytes).unsqueeze(-1)).flatten(-2)), scale_bytes


def decode_mxfp4(packed: Tensor, scale_bytes: Tensor) -> Tensor:
    """Float32 values of `encode_mxfp4`'s bytes: [..., n / 2] and [..., n / 32] uint8 -> [..., n]."""
    values = decode_e2m1(packed).unflatten(-1, (-1, MX_GROUP))
    return (values * decode_e8m0(scale_bytes).unsqueeze(-1)).flatten(-2)


def encode_fp4(x: Tensor) -> tuple[Tensor, Tensor]:
    """Encode groups of 16 channels as E2M1 with E4M3 scales.

    The scale is rounded to nearest, so the largest value of a group may exceed 6 scales and saturates.

    Args:
        x: [..., n] floating point, n a multiple of 16.

    Returns:
        packed codes [..., n / 2] uint8 and scales [..., n / 16] uint8 (E4M3 bits).
    """
    groups = _groups(x, FP4_GROUP)
    scales = (_amax(groups, _FP4_FLOOR) / E2M1_MAX).clamp(max=E4M3_MAX).to(E4M3)
    return encode_e2m1((groups / scales.float().unsqueeze(-1)).flatten(-2)), scales.view(torch.uint8)


def decode_fp4(packed: Tensor, scale_bytes: Tensor) -> Tensor:
    """Float32 values of `encode_fp4`'s bytes: [..., n / 2] and [..., n / 16] uint8 -> [..., n]."""
    values = decode_e2m1(packed).unflatten(-1, (-1, FP4_GROUP))
    return (values * scale_bytes.contiguous().view(E4M3).float().unsqueeze(-1)).flatten(-2)


def encode_e2m1(x: Tensor) -> Tensor:
    """Nearest E2M1 of float32 [..., n], ties to the even code, saturating; packed [..., n / 2] uint8."""
    magnitude = x.abs().contiguous()
    bits = magnitude.view(torch.int32)
    # From 1 on a code is the float's exponent with the first mantissa bit, rounded; below 1 that is too small
    # and the code is the number of halves.
    codes = (bits >> 22).bitwise_and_(1).add_(bits).add_(0x1FFFFF).bitwise_right_shift_(22)
    codes.sub_(252).clamp_(max=7)
    halves = magnitude.mul_(2.0).round_().clamp_(max=2.0).to(torch.int32)
    codes = torch.maximum(codes, halves, out=codes)
    codes |= (x.view(torch.int32) >> 28).bitwise_and_(8)
    pairs = codes.view(torch.int64)  # even channel in the low half
    return ((pairs >> 28) | pairs).to(torch.uint8)


def decode_e2m1(packed: Tensor) -> Tensor:
    """[..., n / 2] uint8 -> float32 [..., n]."""
    pairs = _e2m1_pairs(packed.device).index_select(0, packed.reshape(-1).int())
    return pairs.view(*packed.shape[:-1], 2 * packed.shape[-1])


def decode_e8m0(scale_bytes: Tensor) -> Tensor:
    """Powers of two 2^(byte - 127) as float32; byte 255 is NaN."""
    return (
        _e8m0_values(scale_bytes.device)
        .index_select(0, scale_bytes.reshape(-1).int())
        .view(scale_bytes.shape)
    )


def _groups(x: Tensor, size: int) -> Tensor:
    assert x.shape[-1] % size == 0, f"{x.shape=} is not made of groups of {size}"
    return x.float().unflatten(-1, (-1, size))


def _amax(groups: Tensor, floor: float) -> Tensor:
    return groups.abs().amax(-1).clamp(min=floor)


def _ceil_e8m0(x: Tensor) -> Tensor:
    """Byte of the smallest power of two not below positive normal float32 `x`; NaN and inf give 255."""
    bits = x.contiguous().view(torch.int32).clamp(max=0x7F800000)  # a NaN would overflow below
    return ((bits + 0x7FFFFF) >> 23).to(torch.uint8)


@cache
def _e2m1_pairs(device: torch.device) -> Tensor:
    """[256, 2] values of the low and the high nibble of every byte."""
    magnitudes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], device=device)
    values = torch.cat([magnitudes, -magnitudes])
    byte = torch.arange(256, device=device)
    return torch.stack([values[byte & 15], values[byte >> 4]], -1)


@cache
def _e8m0_values(device: torch.device) -> Tensor:
    """[256] values of every scale byte."""
    values = torch.ldexp(torch.ones(256, dtype=torch.float64), torch.arange(256) - 127).float()
    values[255] = torch.nan
    return values.to(device)
