"""Products that take codes: against float64, rows against those alone, and tiles against each other."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import Tensor

from tests.kernels.gemm.weights import fp8_weight
from tests.support.compare import assert_same_bits
from tests.support.kernel_runs import KernelRunner
from tilelang_ops.common.dense_packing import pack_units, unpack_units
from tilelang_ops.common.fp8_products import tile_of, tiles_for
from tilelang_ops.common.row_codes import RowCodes
from tilelang_ops.gemm.linear_w8a8 import cuda as w8a8_cuda
from tilelang_ops.gemm.linear_w8a8 import reference as w8a8_reference

ROW_SAMPLES = ((69, 70), (5, 67))
BITS = 13  # behind the largest that tensor cores keep of what an instruction sums


@pytest.fixture
def run(run_kernel: KernelRunner) -> KernelRunner:
    if run_kernel.place == "sm_100a":
        pytest.skip("the engine takes these products on SM90 alone")
    return run_kernel.overhanging()


def bound(x: Tensor, weight: Tensor) -> Tensor:
    """What the tensor cores may cut off: of 32 products and what was summed before, each loses less than
    2^-13 of the largest of them; then float32's sums of units, and half a unit of the result."""
    pad = -x.shape[1] % 128
    x, weight = (torch.nn.functional.pad(t, (0, pad)).unflatten(1, (-1, 4, 32)) for t in (x, weight))
    sums = torch.einsum("mugk,nugk->mnug", x, weight)
    largest = torch.stack(
        [
            torch.stack([(x[:, None, u, g] * weight[None, :, u, g]).abs().amax(2) for g in range(4)], -1)
            for u in range(x.shape[1])
        ],
        2,
    )
    before = (sums.cumsum(3) - sums).abs()
    cut = 33 * 2.0**-BITS * torch.maximum(largest, before).sum((2, 3))
    return cut + sums.abs().sum((2, 3)) * 2.0**-20 + sums.sum((2, 3)).abs() * 2.0**-8


@pytest.mark.parametrize(
    ("num_rows", "columns", "width", "num_groups"), [(70, 160, 160, 1), (70, 128, 256, 2), (5, 72, 1024, 1)]
)
def test_linear_w8a8(
    run: KernelRunner,
    monkeypatch: pytest.MonkeyPatch,
    num_rows: int,
    columns: int,
    width: int,
    num_groups: int,
) -> None:
    x = torch.randn(num_rows, width * num_groups) * torch.logspace(-3, 3, num_rows)[:, None]
    rows = RowCodes.encode(x)
    weight = pack_units(*fp8_weight(num_groups, columns, width))
    out, _ = run(w8a8_cuda, rows.codes, rows.scales, *weight)
    values = rows.values().double()
    for group, matrix in enumerate(unpack_units(*weight).double()):
        part = values[:, group * width : (group + 1) * width]
        beyond = (out[:, group * columns : (group + 1) * columns].double() - part @ matrix.T).abs()
        assert (beyond <= bound(part, matrix)).all()
    expected = w8a8_reference.run(rows.codes, rows.scales, *weight).float()
    error = (out.float() - expected).square().mean(1)
    assert (error <= 2.0**-16 * expected.square().mean(1)).all()  # a step of bfloat16, of each row
    for first, end in ROW_SAMPLES if num_rows == 70 else ((4, 5),):
        few = RowCodes.encode(x[first:end])
        alone, _ = run(w8a8_cuda, few.codes, few.scales, *weight)
        assert_same_bits(alone, out[first:end], f"rows {first}..{end}")
    if num_groups == 1:
        num_splits = w8a8_cuda._splits(columns, width, 1)
        assert num_splits == (2 if width == 1024 else 1)
        for choice in tiles_for(num_splits, -(-width // 128) // num_splits):
            monkeypatch.setattr(sys.modules[w8a8_cuda.__name__], "tile_of", lambda *_, taken=choice: taken)
            again, _ = run(w8a8_cuda, rows.codes, rows.scales, *weight)
            assert_same_bits(again, out, str(choice))


def test_tiles() -> None:
    """Few rows have tiles of few, many the largest; segments are summed in turn where blocks are many."""
    assert tile_of(8, 5120, 64, 1, 1) == (True, "32x64") and tile_of(8, 1280, 10, 1, 1)[1] == "32x64 twice"
    assert tile_of(256, 5120, 64, 1, 1)[1] == "128x80" and tile_of(4096, 5120, 64, 1, 1)[1] == "128x256"
    assert tile_of(256, 1792, 10, 1, 4)[0] is False and tile_of(4096, 1792, 10, 1, 4)[0] is True
