"""Linear: which inputs are rounded, who chooses the order of sums, groups of columns."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from deepinfer.config import ARITHMETICS
from deepinfer.layers.linear import Linear
from deepinfer.ops.gemm import linear
from deepinfer.ops.quant import round_fp8
from tests.support.compare import assert_same_bits


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("name", list(ARITHMETICS))
def test_inputs_of_quantised_matrices_are_rounded(name: str, quantized: bool) -> None:
    arithmetic = ARITHMETICS[name]
    x = torch.randn(5, 64, dtype=getattr(torch, arithmetic.compute_dtype))
    layer = Linear(torch.randn(24, 64).bfloat16(), quantized, "w")
    rounds = quantized and name == "w8a8"
    expected = linear(round_fp8(x) if rounds else x, layer.weight)
    assert_same_bits(layer(x, arithmetic), expected)
    assert_same_bits(layer(x, arithmetic, is_rounded=True), linear(x, layer.weight))
    grouped = x.view(5, 2, 32)
    halves = Linear(torch.randn(48, 32), quantized, "w")
    parts = [round_fp8(part) if rounds else part for part in grouped.unbind(1)]
    expected = torch.stack(
        [linear(parts[0], halves.weight[:24]), linear(parts[1], halves.weight[24:])], dim=1
    )
    assert_same_bits(halves.by_group(grouped, arithmetic), expected)


@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["float32", "w8a8"])
def test_library_order(name: str, weight_dtype: torch.dtype) -> None:
    arithmetic = ARITHMETICS[name]
    x = torch.randn(5, 64, dtype=getattr(torch, arithmetic.compute_dtype))
    layer = Linear(torch.randn(24, 64).to(weight_dtype), True, "w")
    loose = replace(arithmetic, batch_invariant=False)
    close = {"rtol": 0.01, "atol": 0.05 if name == "w8a8" else 1e-5}
    torch.testing.assert_close(layer(x, loose), layer(x, arithmetic), **close)
    out = layer(x, loose, torch.float32)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out, layer(x, arithmetic, torch.float32), rtol=1e-5, atol=1e-5)
    halves = Linear(torch.randn(48, 32), True, "w")
    grouped = x.view(5, 2, 32)
    torch.testing.assert_close(halves.by_group(grouped, loose), halves.by_group(grouped, arithmetic), **close)
