"""round_rows' kernel against encoding and decoding, bit by bit."""

from __future__ import annotations

import pytest
import torch

from tests.support.compare import assert_same_bits
from tests.support.kernel_runs import KernelRunner
from tilelang_ops.projection.encode_rows import Rotation
from tilelang_ops.projection.round_rows import cuda, reference


@pytest.mark.parametrize("format", ["fp8", "mxfp4"])
def test_rounded_values(run_kernel: KernelRunner, format: str) -> None:
    """As they are, and turned by quarters, which is exact; a row alone; a NaN spoils its group only."""
    x = (torch.randn(12, 64) * torch.logspace(-6, 6, 12)[:, None]).bfloat16()
    x[0, :40] = 0.0
    actual, _ = run_kernel.overhanging()(cuda, x, format, None)
    assert_same_bits(actual, reference.run(x, format, None), "values")
    heads = x.view(4, 3, 64)
    turns = torch.randint(0, 4, (4, 16))
    cos, sin = torch.tensor([1.0, 0.0, -1.0, 0.0])[turns], torch.tensor([0.0, 1.0, 0.0, -1.0])[turns]
    for inverse in (False, True):
        rotation = Rotation(cos, sin, inverse)
        actual, _ = run_kernel.overhanging()(cuda, heads, format, rotation)
        assert_same_bits(actual, reference.run(heads, format, rotation), f"{inverse=}")
    alone, _ = run_kernel.overhanging()(cuda, heads[2:3], format, Rotation(cos[2:3], sin[2:3], True))
    assert_same_bits(alone[0], actual[2], "a row alone")
    x[5, 3] = torch.nan
    spoilt, _ = run_kernel.overhanging()(cuda, x, format, None)
    assert spoilt[5, :32].isnan().all()
    assert_same_bits(spoilt[5, 32:], reference.run(x, format, None)[5, 32:], "the other group")
