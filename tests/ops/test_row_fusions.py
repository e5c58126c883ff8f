"""The fused row operators on the CPU: the composition that each stands for, and empty inputs."""

from __future__ import annotations

import torch

from tests.support.compare import assert_same_bits
from tilelang_ops.common.numerics import encode_fp8, encode_mxfp4
from tilelang_ops.hyper_connection import advance_norm, advance_streams, mean_streams
from tilelang_ops.memory import gather_rows
from tilelang_ops.moe import combine_slots, group_rows, swiglu, swiglu_quantize
from tilelang_ops.norm import norm_quantize, rms_norm
from tilelang_ops.projection import Norm, Records, Rotation, encode_rows, rotate

EPS = 1e-6


def test_norm_quantize() -> None:
    x, residual, weight = torch.randn(3, 64).bfloat16(), torch.randn(3, 64).bfloat16(), torch.rand(64)
    result = norm_quantize(x, weight, EPS, residual, keeps_values=True)
    assert_same_bits(result.total, x + residual)
    torch.testing.assert_close(result.values, rms_norm(x + residual, weight, EPS), rtol=2.0**-7, atol=0)
    codes, scales = encode_fp8(result.values)
    assert torch.equal(result.codes, codes) and torch.equal(result.scales, scales)
    assert norm_quantize(x[:0], weight, EPS).codes.shape == (0, 64)


def test_encode_rows() -> None:
    x, weight = torch.randn(3, 2, 64).bfloat16(), torch.rand(64)
    angles = torch.randn(3, 8)
    rotation = Rotation(angles.cos(), angles.sin(), inverse=True)
    result = encode_rows(x, "mxfp4", norm=Norm(weight, EPS), rotation=rotation, keeps_normed=True)
    turned = rotate(result.normed.clone(), rotation.cos, rotation.sin, inverse=True)
    codes, scales = encode_mxfp4(turned)
    torch.testing.assert_close(result.normed, rms_norm(x, weight, EPS), rtol=2.0**-7, atol=0)
    assert (result.codes != codes).sum() <= 1 and torch.equal(result.scales, scales)

    pool = torch.zeros(2, 4, 66, dtype=torch.uint8)
    encode_rows(x.flatten(0, 1), "fp8", records=Records(pool, None, torch.tensor([7, -1, 0, 2, -1, 1])))
    records = torch.cat(encode_fp8(x.flatten(0, 1)), dim=1)
    assert torch.equal(pool.flatten(0, 1)[[7, 0, 2, 1]], records[[0, 2, 3, 5]]) and not pool[0, 3].any()
    empty = encode_rows(x[:0], "fp4", keeps_normed=False)
    assert empty.codes.shape == (0, 2, 32) and empty.scales.shape == (0, 2, 4)


def test_advance_norm_and_mean() -> None:
    streams, pre, weight = torch.randn(3, 4, 32), torch.rand(3, 4), torch.rand(32)
    _, collapsed, square = advance_streams(streams, pre)
    result = advance_norm(streams, pre, weight, EPS, encoding="codes")
    torch.testing.assert_close(result.values, rms_norm(collapsed, weight, EPS))
    torch.testing.assert_close(result.mean_square, square)
    codes, _ = encode_fp8(result.values)
    assert torch.equal(result.codes, codes)
    features = torch.zeros(3, 96)
    mean_streams(streams, features, 1)
    torch.testing.assert_close(features[:, 32:64], streams.mean(1))
    assert not features[:, :32].any() and not features[:, 64:].any()


def test_experts() -> None:
    """Rows sorted by expert, a product of each, and back: the sum over slots of what each expert gives."""
    ids = torch.tensor([[2, 0], [0, -1], [2, 1]], dtype=torch.int32)
    x, scale = torch.randn(3, 16), torch.tensor([1.0, 10.0, 100.0])
    for tile in (1, 4):
        groups = group_rows(ids, 3, tile)
        rows = gather_rows(x, groups.slots, divisor=2)
        experts = groups.tile_experts.repeat_interleave(tile)
        rows = rows * torch.where(experts >= 0, scale[experts.clamp(min=0).long()], 0.0)[:, None]
        shared = torch.randn(3, 16)
        out = combine_slots(rows, groups.places, None, shared)
        factors = torch.where(ids >= 0, scale[ids.clamp(min=0).long()], 0.0).sum(1)
        torch.testing.assert_close(out, x * factors[:, None] + shared)
    assert group_rows(ids[:0], 3, 4).offsets.tolist() == [0, 0, 0, 0]
    assert gather_rows(x, torch.tensor([3, -1, 2])).tolist() == [[0.0] * 16, [0.0] * 16, x[2].tolist()]


def test_swiglu_quantize() -> None:
    gate_up, weight = torch.randn(3, 64).bfloat16(), torch.rand(2, 2)
    slots = torch.tensor([3, -1, 0], dtype=torch.int32)
    codes, scales = swiglu_quantize(gate_up, 10.0, weight, slots)
    values = swiglu(gate_up[[0, 2]], 10.0, torch.bfloat16, weight.flatten()[[3, 0]])
    expected = encode_fp8(values)
    assert torch.equal(codes[[0, 2]], expected[0]) and torch.equal(scales[[0, 2]], expected[1])
    assert swiglu_quantize(gate_up[:0], 10.0)[1].shape == (0, 1)
