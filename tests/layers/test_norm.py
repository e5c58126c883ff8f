"""RMS norm: closed form, one rounding, bits of a row alone."""

from __future__ import annotations

import pytest
import torch

from deepinfer.layers.norm import RMSNorm, rms_norm
from tests.support.compare import assert_same_bits


@pytest.mark.parametrize("shape", [(1, 4), (7, 512), (3, 2, 128), (0, 16)])
@pytest.mark.parametrize("eps", [1e-20, 1e-6, 0.5])
def test_closed_form(shape: tuple[int, ...], eps: float) -> None:
    x, weight = torch.randn(shape) * 3, torch.rand(shape[-1]) + 0.5
    wide = x.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()
    torch.testing.assert_close(RMSNorm(weight, eps)(x).double(), expected, rtol=1e-6, atol=1e-7)


def test_one_rounding() -> None:
    """A bf16 input is widened first and the product rounded once at the end."""
    x, weight = torch.randn(20, 256).bfloat16(), torch.rand(256) + 0.5
    assert_same_bits(rms_norm(x, weight, 1e-6), rms_norm(x.float(), weight, 1e-6).bfloat16())


def test_zero_row_stays_zero() -> None:
    assert_same_bits(rms_norm(torch.zeros(2, 8), torch.ones(8), 1e-20), torch.zeros(2, 8))


@pytest.mark.parametrize("width", [24, 128, 512, 5120])
def test_bits_do_not_depend_on_the_batch(width: int) -> None:
    x, weight = torch.randn(67, width), torch.rand(width)
    whole = rms_norm(x, weight, 1e-20)
    for start, stop in ((0, 1), (13, 14), (20, 37), (66, 67)):
        assert_same_bits(rms_norm(x[start:stop].clone(), weight, 1e-20), whole[start:stop])
    assert_same_bits(rms_norm(x.repeat(1, 2)[:, width:], weight, 1e-20), whole, "a strided input")
