"""gate_streams: golden block, float64, a dot product of zero, single rows."""

from __future__ import annotations

import math

import pytest
import torch

from tests.support.compare import assert_same_bits, check_against_cpu
from tilelang_ops.engram import gate_streams


def test_golden_block(units) -> None:
    block = units.under("engram/gate")
    actual = gate_streams(block["streams"], block["key_value"], block["q_weight"] * block["k_weight"], 1e-20)
    torch.testing.assert_close(actual, block["out"], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("num_rows", "num_streams", "width"), [(1, 4, 256), (9, 4, 96), (40, 2, 257)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_against_float64(num_rows: int, num_streams: int, width: int, dtype: torch.dtype) -> None:
    streams = torch.randn(num_rows, num_streams, width).to(dtype)
    key_value = torch.randn(num_rows, (num_streams + 1) * width).to(dtype)
    weight = torch.randn(num_streams, width)
    actual = gate_streams(streams, key_value, weight, 1e-20)
    x = streams.double()
    keys, value = key_value.double().split([num_streams * width, width], 1)
    keys = keys.view_as(x)
    dot = (x * weight.double() * keys).sum(-1) / (x.norm(dim=-1) * keys.norm(dim=-1)) * width**0.5
    gate = torch.sigmoid(dot.sign() * dot.abs().clamp_min(1e-6).sqrt())
    expected = x + gate[..., None] * value[:, None]
    rtol = 2.0**-8 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(actual.double(), expected, rtol=rtol, atol=1e-5)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_dot_of_zero_opens_the_gate_half(sign: float) -> None:
    streams = torch.zeros(1, 1, 32)
    streams[0, 0, 0] = 1.0
    key = torch.zeros(32)
    key[1] = 1.0  # orthogonal
    key[0] = sign * 1e-12
    key_value = torch.cat([key, torch.ones(32)]).unsqueeze(0)
    gate = gate_streams(streams, key_value, torch.ones(1, 32), 1e-20)[0, 0, 5].item()
    assert gate == pytest.approx(1 / (1 + math.exp(-sign * 1e-3)), abs=1e-7)


def test_row_alone_is_row_in_batch() -> None:
    streams, key_value, weight = torch.randn(70, 4, 256), torch.randn(70, 5 * 256), torch.randn(4, 256)
    batch = gate_streams(streams, key_value, weight, 1e-20)
    for start, stop in [(0, 1), (69, 70), (5, 6), (3, 20), (1, 70)]:
        part = gate_streams(streams[start:stop], key_value[start:stop], weight, 1e-20)
        assert_same_bits(part, batch[start:stop], f"rows {start}..{stop}")


def test_on_device(device: str) -> None:
    inputs = torch.randn(6, 4, 128), torch.randn(6, 5 * 128), torch.randn(4, 128), 1e-20
    check_against_cpu(gate_streams, *inputs, device=device, rtol=1e-5, atol=1e-5)
