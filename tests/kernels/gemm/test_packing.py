"""Packed weights hold the checkpoint's values, and nothing that is not exact."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.gemm.weights import fp8_values, fp8_weight, mxfp4_values, mxfp4_weight
from tilelang_ops.common.dense_packing import pack_units, unpack_units
from tilelang_ops.common.packing import pack_fp8, pack_mxfp4, split_float32, unpack_fp8, unpack_mxfp4


@pytest.mark.parametrize("gated", [False, True])
def test_packed_values(gated: bool) -> None:
    codes, scales = fp8_weight(2, 128, 96)
    unpacked = unpack_fp8(pack_fp8(codes, scales, gated=gated), gated=gated)
    assert torch.equal(unpacked[:, :, :96], fp8_values(codes, scales)) and not unpacked[:, :, 96:].any()
    codes, scales = mxfp4_weight(2, 128, 96)
    unpacked = unpack_mxfp4(pack_mxfp4(codes, scales, gated=gated), gated=gated)
    assert torch.equal(unpacked[:, :, :96], mxfp4_values(codes, scales)) and not unpacked[:, :, 96:].any()


def test_units() -> None:
    """Codes with a scale for 128 channels: exact but for what is 2^-6 of the scale and less."""
    codes, scales = fp8_weight(2, 72, 160)
    scales[:, 1, 2] = 30  # zeros, and values far below those of their neighbours
    codes[:, 32:64, :32] = 0
    values = fp8_values(codes, scales)
    packed, unit_scales = pack_units(codes, scales)
    assert packed.shape == codes.shape and unit_scales.shape == (2, 2, 4)
    by_value = unit_scales.transpose(1, 2).repeat_interleave(32, 1).repeat_interleave(128, 2)[:, :72, :160]
    error = (unpack_units(packed, unit_scales) - values).abs()
    is_small = values.abs() < 2.0**-6 * by_value
    assert not error[~is_small].any() and is_small.any() and (error <= 2.0**-10 * by_value).all()
    groups = scales.long()
    groups[:, 1, 0] = 0
    largest = torch.nn.functional.pad(groups, (0, 3)).unflatten(2, (2, 4)).amax(3).transpose(1, 2)
    assert torch.equal(unit_scales[:, :, :3], torch.exp2(largest.float() - 127))


def test_rows_are_padded() -> None:
    codes, scales = fp8_weight(1, 72, 64)
    unpacked = unpack_fp8(pack_fp8(codes, scales))
    assert torch.equal(unpacked[:, :72], fp8_values(codes, scales)) and not unpacked[:, 72:].any()


@pytest.mark.parametrize("byte", [129, 255])
def test_scales_beyond_bfloat16(byte: int) -> None:
    codes, scales = mxfp4_weight(1, 64, 64)
    scales[0, 3, 1] = byte
    with pytest.raises(ValueError, match=f"scale byte {byte}"):
        pack_mxfp4(codes, scales)
    codes, scales = fp8_weight(1, 64, 64)
    scales[0, 1, 1] = byte + 6 if byte == 129 else byte
    for pack in (pack_fp8, pack_units):
        with pytest.raises(ValueError, match="scale byte"):
            pack(codes, scales)


def test_float32_in_three_terms() -> None:
    weight = torch.randn(8, 64) * torch.logspace(-20, 20, 64)
    terms = split_float32(weight).double().view(3, 8, 64)
    assert torch.equal(terms.sum(0).float(), weight)
