"""swiglu: golden block, float64, the limits, single rows."""

from __future__ import annotations

import pytest
import torch

from tests.support.compare import assert_same_bits, check_against_cpu
from tilelang_ops.moe import swiglu


def test_golden_block(units) -> None:
    block = units.under("swiglu")
    actual = swiglu(block["gate_and_up"], 10.0, torch.float32, block["weight"])
    torch.testing.assert_close(actual, block["out"], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("num_rows", "width"), [(1, 8), (5, 129), (33, 64)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_against_float64(num_rows: int, width: int, dtype: torch.dtype) -> None:
    gate_up, weight = (4 * torch.randn(num_rows, 2 * width)).to(dtype), torch.rand(num_rows)
    gate, up = gate_up.double().chunk(2, 1)
    expected = torch.nn.functional.silu(gate.clamp(max=2.5)) * up.clamp(-2.5, 2.5) * weight.double()[:, None]
    actual = swiglu(gate_up, 2.5, dtype, weight)
    assert actual.dtype == dtype
    rtol = 2.0**-8 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(actual.double(), expected, rtol=rtol, atol=1e-6)


def test_gate_is_bounded_above_only() -> None:
    gate_up = torch.tensor([[30.0, -30.0, 1.0, 1.0, 30.0, -30.0]])  # gates, then ups
    actual = swiglu(gate_up, 10.0, torch.float32)[0].tolist()
    silu = [
        10 / (1 + 2.718281828459045**-10),
        -30 / (1 + 2.718281828459045**30),
        1 / (1 + 2.718281828459045**-1),
    ]
    assert actual == pytest.approx([silu[0], silu[1] * 10, -10 * silu[2]], rel=1e-5)


def test_row_alone_is_row_in_batch() -> None:
    for width in (31, 128):
        gate_up = torch.randn(50, 2 * width)
        batch = swiglu(gate_up, 2.5, torch.float32)
        for start, stop in [(0, 1), (49, 50), (7, 8), (3, 20), (1, 50)]:
            part = swiglu(gate_up[start:stop], 2.5, torch.float32)
            assert_same_bits(part, batch[start:stop], f"rows {start}..{stop}")


def test_no_rows() -> None:
    assert swiglu(torch.empty(0, 16), 1.0, torch.bfloat16).shape == (0, 8)


def test_on_device(device: str) -> None:
    check_against_cpu(
        swiglu, torch.randn(5, 64), 2.5, torch.float32, torch.rand(5), device=device, rtol=1e-6, atol=1e-6
    )
