"""Dequantisation against bit arithmetic written out for one value, and golden matrices."""

from __future__ import annotations

import math

import pytest
import torch

from deepinfer.checkpoint.dequantize import dequantize_fp4, dequantize_fp8
from deepinfer.checkpoint.reader import CheckpointReader
from deepinfer.models.deepseek_v41.weights import Weights
from tests.checkpoint.micro import FIRST, Entry, micro_files, write
from tests.support.compare import assert_same_bits
from tests.support.paths import TINY_QUANT


def e4m3(byte: int) -> float:
    """One E4M3 value, from its fields."""
    sign = -1.0 if byte & 0x80 else 1.0
    exponent, mantissa = byte >> 3 & 15, byte & 7
    if exponent == 0:
        return sign * math.ldexp(mantissa, -9)
    return sign * math.ldexp(8 + mantissa, exponent - 10)


def e2m1(nibble: int) -> float:
    """One E2M1 value, from its fields."""
    sign = -1.0 if nibble & 8 else 1.0
    exponent, mantissa = nibble >> 1 & 3, nibble & 1
    return sign * (mantissa / 2 if exponent == 0 else math.ldexp(2 + mantissa, exponent - 2))


def e8m0(byte: int) -> float:
    return math.ldexp(1.0, byte - 127)


FINITE_E4M3 = [byte for byte in range(256) if byte & 0x7F != 0x7F]


def test_every_fp8_value_under_every_scale() -> None:
    scales = list(range(0, 247))  # 448 * 2^(247 - 127) would leave float32
    codes = torch.tensor(FINITE_E4M3, dtype=torch.uint8)
    for scale in scales:
        data = codes.view(1, -1).repeat(32, 1).view(torch.float8_e4m3fn)
        out = torch.empty(32, len(codes))
        dequantize_fp8(data, torch.full((1, -(-len(codes) // 32)), scale, dtype=torch.uint8), out)
        expected = torch.tensor([e4m3(byte) * e8m0(scale) for byte in FINITE_E4M3], dtype=torch.float64)
        assert torch.equal(expected.float().double(), expected)  # exact in float32, subnormals included
        assert_same_bits(out, expected.float().expand(32, -1).contiguous(), f"scale {scale}")


def test_every_fp4_byte_under_every_scale() -> None:
    data = torch.arange(256, dtype=torch.uint8).view(16, 16).view(torch.int8)
    for scale in range(0, 253):
        out = torch.empty(16, 32)
        dequantize_fp4(data, torch.full((16, 1), scale, dtype=torch.uint8), out)
        expected = [
            [e2m1(n) * e8m0(scale) for b in range(16 * r, 16 * r + 16) for n in (b & 15, b >> 4)]
            for r in range(16)
        ]
        assert_same_bits(out, torch.tensor(expected, dtype=torch.float64).float(), f"scale {scale}")


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (31, 33), (32, 32), (33, 31), (64, 96), (70, 100)])
def test_fp8_blocks(rows: int, columns: int) -> None:
    codes = torch.randint(0, 127, (rows, columns), dtype=torch.uint8)
    scale = torch.randint(100, 150, (-(-rows // 32), -(-columns // 32)), dtype=torch.uint8)
    out = torch.empty(rows, columns)
    dequantize_fp8(codes.view(torch.float8_e4m3fn), scale, out)
    expected = [
        [e4m3(int(codes[r, c])) * e8m0(int(scale[r // 32, c // 32])) for c in range(columns)]
        for r in range(rows)
    ]
    assert out.tolist() == expected


@pytest.mark.parametrize(("rows", "columns"), [(1, 2), (3, 32), (5, 64), (33, 96), (4, 40)])
def test_fp4_rows(rows: int, columns: int) -> None:
    data = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8)
    scale = torch.randint(100, 150, (rows, -(-columns // 32)), dtype=torch.uint8)
    out = torch.empty(rows, columns)
    dequantize_fp4(data.view(torch.int8), scale, out)
    expected = [
        [
            e2m1(int(data[r, c // 2]) >> 4 * (c % 2) & 15) * e8m0(int(scale[r, c // 32]))
            for c in range(columns)
        ]
        for r in range(rows)
    ]
    assert out.tolist() == expected


@pytest.fixture(scope="module")
def weights() -> Weights:
    return Weights(CheckpointReader(TINY_QUANT))


def test_golden_sums(units, weights: Weights) -> None:
    """Sum and sum of magnitudes of every quantised matrix of the random model."""
    values = units.about["decoded_sums"]["values"]
    assert len(values) > 400
    for name, (shape, total, magnitude) in values.items():
        prefix = name.removesuffix(".weight")
        if ".engram.embed" in name:
            matrix = decode_table(weights, prefix, range(shape[0]))
        else:
            matrix = weights.linear(prefix).weight
        assert list(matrix.shape) == shape
        assert matrix.double().sum().item() == pytest.approx(total, abs=1e-9), name
        assert matrix.double().abs().sum().item() == pytest.approx(magnitude, rel=1e-12), name


def test_golden_rows(units, weights: Weights) -> None:
    decoded = units.under("decode")
    prefixes = {key.rsplit("/", 1)[0] for key in decoded}
    assert len(prefixes) == 11
    for prefix in prefixes:
        rows = decoded[f"{prefix}/rows"].long()
        if ".engram.embed" in prefix:
            values = decode_table(weights, prefix, rows.tolist())
        else:
            values = weights.linear(prefix).weight[rows].float()
        assert torch.equal(values, decoded[f"{prefix}/values"]), prefix  # the golden values have no -0


def decode_table(weights: Weights, prefix: str, rows: range | list[int]) -> torch.Tensor:
    """Rows of a table by bit arithmetic."""
    table = weights.table(prefix)
    index = torch.tensor(list(rows))
    fp8 = torch.tensor([e4m3(byte) for byte in range(256)])
    values = fp8[table.rows[index].long()]
    powers = torch.tensor([e8m0(byte) for byte in range(255)], dtype=torch.float64).float()
    return values * powers[table.scales[index].long()].repeat_interleave(32, dim=1)


def test_chunks_give_the_same_values(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, sliced = Weights(CheckpointReader(TINY_QUANT)), Weights(CheckpointReader(TINY_QUANT))
    names = ["layers.0.attn.wq_b", "layers.0.ffn.experts.1.w1", "layers.1.engram.wkv", "head"]
    expected = [whole.linear(name).weight for name in names] + [whole.tensor("embed.weight")]
    monkeypatch.setattr("deepinfer.checkpoint.reader.CHUNK_BYTES", 9000)  # a few rows
    actual = [sliced.linear(name).weight for name in names] + [sliced.tensor("embed.weight")]
    for name, a, b in zip([*names, "embed"], actual, expected):
        assert_same_bits(a, b, name)


def test_forms_that_modules_load(weights: Weights) -> None:
    w1 = weights.linear("layers.2.ffn.shared_experts.w1")
    w3 = weights.linear("layers.2.ffn.shared_experts.w3")
    both = weights.linear("layers.2.ffn.shared_experts.w1", "layers.2.ffn.shared_experts.w3")
    assert both.name == w1.name == "layers.2.ffn.shared_experts.w1"
    assert w1.quantized
    assert both.quantized
    assert_same_bits(both.weight, torch.cat([w1.weight, w3.weight]))
    gate = weights.linear("layers.2.ffn.gate")
    assert not gate.quantized
    assert gate.weight.dtype == w1.weight.dtype == torch.bfloat16
    experts = weights.experts("layers.2.ffn.experts", 12)
    assert experts.w13.shape == (12, 256, 256)
    assert experts.w2.shape == (12, 256, 128)
    for expert in (0, 11):
        prefix = f"layers.2.ffn.experts.{expert}"
        parts = [weights.linear(f"{prefix}.w1").weight, weights.linear(f"{prefix}.w3").weight]
        assert_same_bits(experts.w13[expert], torch.cat(parts))
        assert_same_bits(experts.w2[expert], weights.linear(f"{prefix}.w2").weight)
    assert weights.tensor("norm.weight").dtype == torch.bfloat16
    assert_same_bits(weights.tensor("norm.weight", torch.float32), weights.tensor("norm.weight").float())
    table = weights.table("layers.3.engram.embed")
    assert table.rows.dtype == table.scales.dtype == torch.uint8
    assert table.rows.shape == (2148, 128)
    assert table.scales.shape == (2148, 4)


def test_wide_table_has_no_scales(tmp_path) -> None:
    files = micro_files()
    files[FIRST]["layers.1.engram.embed.weight"] = Entry("BF16", (24, 32), bytes(24 * 32 * 2))
    del files[FIRST]["layers.1.engram.embed.scale"]
    table = Weights(CheckpointReader(write(tmp_path, files))).table("layers.1.engram.embed")
    assert table.scales is None
    assert table.rows.dtype == torch.bfloat16


@pytest.mark.parametrize("scale", [0, 2, 3, 4, 254 - 16])
def test_matrices_are_held_exactly(tmp_path, scale: int) -> None:
    """bfloat16 holds every value of an FP8 matrix down to scale 3; below it the matrix is kept in float32."""
    codes = bytes(code for code in range(256) if code & 127 != 127) * 2 + bytes(4)  # 512 of them
    files = {
        "model.safetensors": {
            "fp8.weight": Entry("F8_E4M3", (16, 32), codes),
            "fp8.scale": Entry("F8_E8M0", (1, 1), bytes([scale])),
        }
    }
    write(tmp_path, files)
    (tmp_path / "model.safetensors.index.json").unlink()
    held = Weights(CheckpointReader(tmp_path)).linear("fp8").weight
    assert held.dtype == (torch.float32 if scale < 3 else torch.bfloat16)
    expected = torch.tensor([e4m3(code) * e8m0(scale) for code in codes], dtype=torch.float64).view(16, 32)
    assert torch.equal(held.double(), expected)


@pytest.mark.parametrize("stored", ["F32", "BF16"])
def test_plain_matrices_keep_their_width(tmp_path, stored: str) -> None:
    width = 4 if stored == "F32" else 2
    write(tmp_path, {"model.safetensors": {"gate.weight": Entry(stored, (3, 8), bytes(24 * width))}})
    (tmp_path / "model.safetensors.index.json").unlink()
    weight = Weights(CheckpointReader(tmp_path)).linear("gate").weight
    assert weight.dtype == (torch.float32 if stored == "F32" else torch.bfloat16)
