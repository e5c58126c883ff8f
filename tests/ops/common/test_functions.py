"""sigmoid, silu and softplus: values, limits, and bits that depend on the value alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.compare import assert_same_bits
from tilelang_ops.common import numerics

FUNCTIONS = {"sigmoid": torch.sigmoid, "silu": F.silu, "softplus": F.softplus}
Function = Callable[[Tensor], Tensor]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_values(name: str) -> None:
    x = torch.cat([torch.linspace(-30, 30, 20001), torch.tensor([0.0, -0.0, 1e-30, -1e-30])])
    torch.testing.assert_close(
        getattr(numerics, name)(x), FUNCTIONS[name](x.double()).float(), rtol=1e-6, atol=1e-37
    )


@pytest.mark.parametrize("name", FUNCTIONS)
def test_limits(name: str) -> None:
    """No overflow far out; NaN stays NaN."""
    x = torch.tensor([-1e4, 1e4, -1e38, 1e38, -torch.inf, torch.inf, torch.nan])
    expected = {
        "sigmoid": [0.0, 1.0, 0.0, 1.0, 0.0, 1.0],
        "silu": [-0.0, 1e4, -0.0, 1e38, torch.nan, torch.inf],
        "softplus": [0.0, 1e4, 0.0, 1e38, 0.0, torch.inf],
    }[name]
    result = getattr(numerics, name)(x)
    torch.testing.assert_close(result[:-1], torch.tensor(expected), equal_nan=True)
    assert result[-1].isnan()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_bits_do_not_depend_on_the_place(name: str) -> None:
    """Vector body or scalar tail: every slice has the bits of the whole."""
    function: Function = getattr(numerics, name)
    x = torch.randn(3000) * 4
    whole = function(x)
    for size in (1, 2, 3, 5, 7, 8, 15, 16, 17, 31, 33):
        for start in range(0, 600, 7):
            part = x[start : start + size].clone()
            assert_same_bits(function(part), whole[start : start + size], f"{size=} {start=}")


@pytest.mark.parametrize("name", FUNCTIONS)
def test_result_is_float32(name: str) -> None:
    x = torch.randn(9).bfloat16()
    assert_same_bits(getattr(numerics, name)(x), getattr(numerics, name)(x.float()))
