"""The matrix products: against float64, and each row against that row alone."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch
from torch import Tensor

from tests.kernels.gemm.weights import fp8_weight, mxfp4_weight, rounded_rows
from tests.support.compare import assert_same_bits
from tests.support.kernel_runs import KernelRunner
from tilelang_ops.common.matrix_tiles import split_count
from tilelang_ops.common.packing import pack_fp8, pack_mxfp4, split_float32, unpack_fp8, unpack_mxfp4
from tilelang_ops.gemm.grouped_linear_mxfp4 import cuda as grouped_cuda
from tilelang_ops.gemm.grouped_linear_mxfp4 import reference as grouped_reference
from tilelang_ops.gemm.grouped_swiglu_mxfp4 import cuda as swiglu_cuda
from tilelang_ops.gemm.grouped_swiglu_mxfp4 import reference as swiglu_reference
from tilelang_ops.gemm.linear import cuda as linear_cuda
from tilelang_ops.gemm.linear import reference as linear_reference
from tilelang_ops.gemm.linear_fp8 import cuda as fp8_cuda
from tilelang_ops.gemm.linear_fp8 import reference as fp8_reference

WIDTH = 256  # one stage of four steps
ROW_SAMPLES = ((69, 70), (5, 67))


@pytest.fixture
def run(run_kernel: KernelRunner) -> KernelRunner:
    return run_kernel.overhanging()


def assert_close(actual: Tensor, x: Tensor, weight: Tensor) -> None:
    """Float32 sums are within 2^-20 of the sum of magnitudes; rounding the result adds half a unit."""
    exact, magnitudes = x.double() @ weight.double().T, x.double().abs() @ weight.double().abs().T
    unit = 2.0**-8 if actual.dtype == torch.bfloat16 else 2.0**-23
    assert ((actual.double() - exact).abs() <= magnitudes * 2.0**-20 + exact.abs() * unit).all()


@pytest.mark.parametrize(
    ("num_rows", "columns", "width", "num_groups"), [(70, 160, 160, 1), (70, 128, WIDTH, 2), (5, 72, 1024, 1)]
)
def test_linear_fp8(
    run: KernelRunner,
    monkeypatch: pytest.MonkeyPatch,
    num_rows: int,
    columns: int,
    width: int,
    num_groups: int,
) -> None:
    x = rounded_rows(num_rows, width * num_groups)
    weight = pack_fp8(*fp8_weight(num_groups, columns, width))
    out, _ = run(fp8_cuda, x, weight, columns, num_groups)
    for group, values in enumerate(unpack_fp8(weight)):
        part = out[:, group * columns : (group + 1) * columns]
        assert_close(part, x[:, group * width : (group + 1) * width], values[:columns, :width])
    torch.testing.assert_close(
        out, fp8_reference.run(x, weight, columns, num_groups), rtol=2.0**-7, atol=1e-5
    )
    for first, end in ROW_SAMPLES if num_rows == 70 else ((4, 5),):
        alone, _ = run(fp8_cuda, x[first:end], weight, columns, num_groups)
        assert_same_bits(alone, out[first:end], f"rows {first}..{end}")
    module = sys.modules[fp8_cuda.__name__]
    if num_groups == 1 and split_count(columns, width) == 1:
        monkeypatch.setattr(module, "tile_rows", lambda *_: 192)
        in_one, _ = run(fp8_cuda, x, weight, columns, num_groups)
        assert_same_bits(in_one, out, "all rows in one tile")
    if split_count(columns, width) > 1:
        monkeypatch.setattr(module, "FEW_ROWS", 0)
        monkeypatch.setattr(module, "tile_of_splits", lambda *_: (True, 64))
        in_turn, _ = run(fp8_cuda, x, weight, columns, num_groups)
        assert_same_bits(in_turn, out, "segments in one block")


def grouped(
    run: KernelRunner, module: ModuleType, x: Tensor, weights: Tensor, offsets: Tensor, *rest
) -> Tensor:
    return run(module, x, weights, offsets, *rest)[0]


# Tiles of 320 weight rows with 16, 32 and 64 rows of activations, and of 224 in two parts, filled or not.
@pytest.mark.parametrize(
    ("counts", "columns"),
    [([0, 5, 18, 0, 1], 320), ([0, 5, 33, 0, 17], 320), ([90, 0, 66], 320), ([131, 0, 80, 97], 160)],
)
def test_grouped_linear(run: KernelRunner, counts: list[int], columns: int) -> None:
    offsets = torch.tensor([0, *counts]).cumsum(0).int()
    x = rounded_rows(int(offsets[-1]), WIDTH)
    weights = pack_mxfp4(*mxfp4_weight(len(counts), columns, WIDTH))
    out = grouped(run, grouped_cuda, x, weights, offsets, columns)
    for values, first, end in zip(unpack_mxfp4(weights), offsets, offsets[1:], strict=False):
        assert_close(out[first:end], x[first:end], values[:columns, :WIDTH])
    torch.testing.assert_close(
        out, grouped_reference.run(x, weights, offsets, columns), rtol=2.0**-7, atol=1e-5
    )
    for row in (0, len(x) - 1):
        expert = int((offsets[1:] <= row).sum())
        alone = grouped(
            run, grouped_cuda, x[row : row + 1], weights, (torch.arange(len(offsets)) > expert).int(), columns
        )
        assert_same_bits(alone, out[row : row + 1], f"row {row}")


@pytest.mark.parametrize(
    ("counts", "round_output"), [([0, 5, 18, 0, 1], True), ([5, 66], False), ([131, 0, 70], True)]
)
def test_grouped_swiglu(run: KernelRunner, counts: list[int], round_output: bool) -> None:
    offsets = torch.tensor([0, *counts]).cumsum(0).int()
    num_rows = int(offsets[-1])
    x, factors = rounded_rows(num_rows, WIDTH), torch.rand(num_rows)
    weights = pack_mxfp4(*mxfp4_weight(len(counts), 192, WIDTH), gated=True)
    rest = (10.0, 96, round_output)
    out = grouped(run, swiglu_cuda, x, weights, offsets, factors, *rest)
    expected = swiglu_reference.run(x, weights, offsets, factors, *rest)
    # A product that rounds to another bfloat16 moves the activation by a unit, and E4M3 by one of its own.
    unit = 2.0**-3 if round_output else 2.0**-6
    assert ((out.float() - expected.float()).abs() <= expected.float().abs() * unit + 1e-3).all()
    assert (out != expected).float().mean() < 0.01
    row = num_rows - 1
    expert = int((offsets[1:] <= row).sum())
    alone = grouped(
        run,
        swiglu_cuda,
        x[row : row + 1],
        weights,
        (torch.arange(len(offsets)) > expert).int(),
        factors[row : row + 1],
        *rest,
    )
    assert_same_bits(alone, out[row : row + 1], f"row {row}")


@pytest.mark.parametrize(
    ("num_rows", "columns", "width", "parts", "dtype"),
    [
        (70, 200, 72, 1, torch.bfloat16),
        (5, 136, 1024, 1, torch.float32),
        (5, 24, 1024, 3, torch.float32),
    ],
)
def test_linear(
    run: KernelRunner,
    monkeypatch: pytest.MonkeyPatch,
    num_rows: int,
    columns: int,
    width: int,
    parts: int,
    dtype: torch.dtype,
) -> None:
    x, whole = torch.randn(num_rows, width).bfloat16(), torch.randn(columns, width)
    weight = split_float32(whole) if parts == 3 else whole.bfloat16()
    out, _ = run(linear_cuda, x, weight, dtype, parts)
    assert_close(out, x, whole if parts == 3 else weight)
    torch.testing.assert_close(out, linear_reference.run(x, weight, dtype, parts), rtol=2.0**-7, atol=1e-3)
    alone, _ = run(linear_cuda, x[-1:], weight, dtype, parts)
    assert_same_bits(alone, out[-1:], "the last row")
    if split_count(columns * parts, width) > 1:
        for limit in ("MANY_BLOCKS", "MANY_ROWS"):
            monkeypatch.setattr(sys.modules[linear_cuda.__name__], limit, 1)
        in_turn, _ = run(linear_cuda, x, weight, dtype, parts)
        assert_same_bits(in_turn, out, "segments in one block")
