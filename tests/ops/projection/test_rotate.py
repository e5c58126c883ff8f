"""Rotation of channel pairs: golden data, complex products, inverse."""

from __future__ import annotations

import pytest
import torch

from deepinfer.layers.rotary import RotaryTable, yarn_frequencies
from tests.support.compare import assert_same_bits, check_against_cpu
from tests.support.golden import TensorFile
from tilelang_ops.projection import rotate


def test_golden_example(units: TensorFile) -> None:
    """Frequencies of the release's layers with compression."""
    positions = units["rope/example/positions"]
    table = RotaryTable(yarn_frequencies(64, 160000.0, 16, 32, 1, 65536))
    cos, sin = table.rows(positions, int(positions.max()) + 1)
    x = units["rope/example/input"]
    turned, turned_back = rotate(x.clone(), cos, sin), rotate(x.clone(), cos, sin, inverse=True)
    torch.testing.assert_close(turned, units["rope/example/rotated"], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(turned_back, units["rope/example/rotated_back"], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(rotate(turned, cos, sin, inverse=True), x, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(0, 8), (1, 8), (5, 64), (3, 4, 12), (2, 3, 1, 10)])
@pytest.mark.parametrize("pairs", [1, 4])
def test_is_a_complex_product(device: str, dtype: torch.dtype, shape: tuple[int, ...], pairs: int) -> None:
    x = torch.randn(shape).to(dtype)
    angle = torch.randn(shape[0], pairs) * 3
    turned = rotate(x.clone(), angle.cos(), angle.sin())
    head, tail = x.float().split([shape[-1] - 2 * pairs, 2 * pairs], dim=-1)
    turn = torch.polar(torch.ones_like(angle), angle).view(shape[0], *[1] * (len(shape) - 2), pairs)
    product = torch.view_as_complex(tail.unflatten(-1, (pairs, 2)).contiguous()) * turn
    expected = torch.cat([head, torch.view_as_real(product).flatten(-2)], dim=-1)
    tolerance = 1e-6 if dtype == torch.float32 else 2.0**-8
    torch.testing.assert_close(turned.float(), expected, rtol=tolerance, atol=tolerance)
    assert_same_bits(turned[..., : -2 * pairs], x[..., : -2 * pairs])
    check_against_cpu(rotate, x, angle.cos(), angle.sin(), device=device, rtol=tolerance, atol=tolerance)


def test_changes_its_argument() -> None:
    x = torch.randn(3, 8)
    assert rotate(x, torch.zeros(3, 2), torch.ones(3, 2)) is x


def test_bits_do_not_depend_on_the_batch() -> None:
    x, angle = torch.randn(33, 4, 96), torch.randn(33, 32)
    whole = rotate(x.clone(), angle.cos(), angle.sin())
    for row in (0, 7, 32):
        part = slice(row, row + 1)
        assert_same_bits(rotate(x[part].clone(), angle[part].cos(), angle[part].sin()), whole[part])
