"""The norms' kernel against float64 and, for the bytes, against the encoding of its own values."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.support.compare import assert_same_bits
from tests.support.kernel_runs import KernelRunner
from tests.support.row_codes import assert_same_units
from tilelang_ops.common.numerics import decode_fp8, encode_fp8
from tilelang_ops.norm.norm_quantize import cuda as norm_quantize
from tilelang_ops.norm.rms_norm import cuda as rms_norm

EPS = 1e-6


def _close(actual: Tensor, x: Tensor, weight: Tensor) -> None:
    """One rounding to the dtype of x, and the float32 sums of a row in another order."""
    wide = x.double()
    expected = wide / torch.sqrt(wide.square().mean(-1, keepdim=True) + EPS) * weight.double()
    rtol = 2.0**-8 if x.dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(actual.double(), expected, rtol=rtol, atol=1e-7)


@pytest.mark.parametrize(("width", "source"), [(96, torch.float32), (512, torch.bfloat16)])
def test_rms_norm(run_kernel: KernelRunner, width: int, source: torch.dtype) -> None:
    weight = torch.rand(width) + 0.5
    for num_rows in (1, 2, 9):
        x = (torch.randn(num_rows, width) * torch.logspace(-4, 4, num_rows)[:, None]).to(source)
        actual, _ = run_kernel.overhanging()(rms_norm, x, weight, EPS)
        _close(actual, x, weight)
    alone, _ = run_kernel.overhanging()(rms_norm, x[7:8], weight, EPS)
    assert_same_bits(alone[0], actual[7], "a row alone")


@pytest.mark.parametrize("keeps_values", [False, True])
def test_norm_quantize(run_kernel: KernelRunner, keeps_values: bool) -> None:
    width = 256
    weight = torch.rand(width) + 0.5
    x, residual = torch.randn(5, width).bfloat16(), torch.randn(5, width).bfloat16()
    x[3] = 0.0
    x[4, 40] = torch.nan
    for added in (None, residual) if keeps_values else (None,):
        actual, _ = run_kernel.overhanging()(norm_quantize, x, weight, EPS, added, True)
        total = x if added is None else x + added
        assert (actual.total is None) == (added is None)
        if added is not None:
            assert_same_bits(actual.total[:4], total[:4], "total")
        _close(actual.values[:4], total[:4], weight)
        codes, scales = encode_fp8(actual.values)
        assert_same_bits(actual.codes[:4], codes[:4], "codes")
        assert_same_bits(actual.scales, scales, "scales")
    if not keeps_values:
        columns = torch.cat([torch.zeros(5, 32).bfloat16(), x, x[:, :64]], 1)[1:, 32 : 32 + width]
        bare, _ = run_kernel.overhanging()(norm_quantize, columns, weight, EPS, None, False, "rounded")
        assert bare.values is bare.total is bare.codes is None
        rounded = decode_fp8(actual.codes, actual.scales).bfloat16()
        assert_same_bits(bare.rounded[:2], rounded[1:3], "rounded")
        coded, _ = run_kernel.overhanging()(norm_quantize, columns, weight, EPS, None, False, "units")
        assert_same_units(coded.units, actual.values[1:])
