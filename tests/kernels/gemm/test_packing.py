"""Packed weights hold the checkpoint's values, and nothing that is not exact."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.gemm.weights import fp8_values, fp8_weight, mxfp4_values, mxfp4_weight
from tilelang_ops.common.packing import pack_fp8, pack_mxfp4, split_float32, unpack_fp8, unpack_mxfp4


@pytest.mark.parametrize("gated", [False, True])
def test_packed_values(gated: bool) -> None:
    codes, scales = fp8_weight(2, 128, 96)
    unpacked = unpack_fp8(pack_fp8(codes, scales, gated=gated), gated=gated)
    assert torch.equal(unpacked[:, :, :96], fp8_values(codes, scales)) and not unpacked[:, :, 96:].any()
    codes, scales = mxfp4_weight(2, 128, 96)
    unpacked = unpack_mxfp4(pack_mxfp4(codes, scales, gated=gated), gated=gated)
    assert torch.equal(unpacked[:, :, :96], mxfp4_values(codes, scales)) and not unpacked[:, :, 96:].any()


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
    with pytest.raises(ValueError, match="scale byte"):
        pack_fp8(codes, scales)


def test_float32_in_three_terms() -> None:
    weight = torch.randn(8, 64) * torch.logspace(-20, 20, 64)
    terms = split_float32(weight).double().view(3, 8, 64)
    assert torch.equal(terms.sum(0).float(), weight)
