"""gather_dequantize: golden rows of a table, every byte, tables without scales."""

from __future__ import annotations

import pytest
import torch
from safetensors import safe_open

from tests.support.compare import assert_same_bits, check_against_cpu
from tests.support.paths import TINY_QUANT
from tilelang_ops.memory import gather_dequantize


def stored(name: str) -> torch.Tensor:
    for path in sorted(TINY_QUANT.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            if name in file.keys():  # noqa: SIM118  not a mapping
                return file.get_tensor(name)
    raise KeyError(name)


@pytest.mark.parametrize("as_bytes", [False, True])
def test_golden_rows(units, as_bytes: bool) -> None:
    table, scales = stored("layers.1.engram.embed.weight"), stored("layers.1.engram.embed.scale")
    if as_bytes:
        table, scales = table.view(torch.uint8), scales.view(torch.uint8)
    index = units["decode/layers.1.engram.embed/rows"]
    expected = units["decode/layers.1.engram.embed/values"]
    assert_same_bits(gather_dequantize(table, scales, index, torch.float32), expected)
    assert_same_bits(gather_dequantize(table, scales, index, torch.bfloat16).float(), expected)


def test_every_code_and_scale() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(8, 32)
    codes = torch.where((codes & 0x7F) == 0x7F, 0, codes)  # NaN codes do not occur
    table = codes.repeat(255, 1)  # every scale byte but 255 with every code
    scales = torch.arange(255, dtype=torch.uint8).repeat_interleave(8).unsqueeze(1)
    index = torch.randperm(table.shape[0]).int()
    actual = gather_dequantize(table, scales, index, torch.float32)
    values = table.view(torch.float8_e4m3fn).double() * torch.exp2(scales.double() - 127)
    torch.testing.assert_close(actual, values[index.long()].float(), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_scales(dtype: torch.dtype) -> None:
    table = torch.randn(50, 7).bfloat16()
    index = torch.tensor([[3, 3, 0], [49, 1, 2]], dtype=torch.int32)
    actual = gather_dequantize(table, None, index, dtype)
    assert_same_bits(actual, table[index.long()].to(dtype))


def test_no_rows() -> None:
    index = torch.empty(0, 6, dtype=torch.int32)
    actual = gather_dequantize(torch.zeros(4, 64, dtype=torch.uint8), torch.zeros(4, 2), index, torch.float32)
    assert actual.shape == (0, 6, 64)


def test_on_device(device: str) -> None:
    table, scales = torch.randint(0, 120, (90, 64), dtype=torch.uint8), torch.full((90, 2), 125).byte()
    index = torch.randint(0, 90, (5, 6), dtype=torch.int32)
    check_against_cpu(gather_dequantize, table, scales, index, torch.float32, device=device, bitwise=True)
