"""The experts' products by codes: against float64, and each row against that row alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.kernels.gemm.weights import mxfp4_values, mxfp4_weight
from tests.support.compare import assert_same_bits
from tests.support.kernel_runs import KernelRunner
from tilelang_ops.common import expert_wide
from tilelang_ops.common.expert_packing import pack_experts, unpack_experts, weight_codes
from tilelang_ops.common.row_codes import RowCodes, decode_units
from tilelang_ops.gemm.grouped_linear_w4a8 import cuda as linear_cuda
from tilelang_ops.gemm.grouped_linear_w4a8 import reference as linear_reference
from tilelang_ops.gemm.grouped_swiglu_w4a8 import cuda as swiglu_cuda
from tilelang_ops.gemm.grouped_swiglu_w4a8 import reference as swiglu_reference

WIDTH = 320  # two units and a half


@pytest.fixture
def run(run_kernel: KernelRunner) -> KernelRunner:
    if run_kernel.place == "sm_100a":
        pytest.skip("these programs are for SM90 alone")
    return run_kernel.overhanging()


def coded_rows(num_rows: int, width: int) -> RowCodes:
    """Rows whose groups differ in size."""
    sizes = torch.exp2(torch.randint(-6, 7, (num_rows, width // 32))).repeat_interleave(32, 1)
    return RowCodes.encode((torch.randn(num_rows, width) * sizes).bfloat16())


def alone(row: int, rows: RowCodes, offsets: Tensor) -> tuple[RowCodes, Tensor]:
    """A row of a batch and three that are none, and their offsets."""
    expert = int((offsets[1:] <= row).sum())
    codes = torch.nn.functional.pad(rows.codes[row : row + 1], (0, 0, 0, 3), value=0x7F)
    scales = torch.nn.functional.pad(rows.scales[:, row : row + 1], (0, 3), value=torch.nan)
    return RowCodes(codes, scales.contiguous()), (torch.arange(len(offsets)) > expert).int() * 4


def error_bound(x: Tensor, weights: Tensor) -> Tensor:
    """What the sums of x @ weights.T may be off by on SM90, float64 like its arguments.

    An instruction aligns 32 products and the sum so far to the largest of them, and cuts off what is below
    2^-13 of it. Sums of 128 channels begin at zero, and are added up in float32.
    """
    bound = (x.abs() @ weights.abs().T) * 2.0**-20
    for first in range(0, x.shape[1], 32):
        if first % 128 == 0:
            total = torch.zeros_like(bound)
        products = x[:, None, first : first + 32] * weights[None, :, first : first + 32]
        bound += torch.maximum(products.abs().amax(-1), total.abs()) * (33 * 2.0**-13)
        total += products.sum(-1)
    return bound


def test_packing() -> None:
    """Values stay, whatever the scale of a group of zeros; scales too far apart are refused."""
    codes, scales = mxfp4_weight(2, 128, 320)
    codes[0, 5, 16:32] = 0x80
    scales[0, 5, 1] = 3
    scales[1, 7, :2] = torch.tensor([125, 114])
    for gated in (False, True):
        packed, references = pack_experts(codes, scales, gated=gated)
        assert packed.shape == (2, 2, 5, 17, 32) and references.shape == (2, 128)
        unpacked = unpack_experts(packed, references, gated=gated)
        assert_same_bits(unpacked[..., :320], mxfp4_values(codes, scales))
    scales[1, 7, 1] = 113
    with pytest.raises(ValueError, match=r"2\^12 apart, at most 2\^11"):
        pack_experts(codes, scales)


@pytest.mark.parametrize(
    ("counts", "columns"), [([0, 8, 20, 0, 4], 320), ([40, 0, 68], 320), ([132, 12], 160), ([116], 512)]
)
def test_grouped_linear(run: KernelRunner, counts: list[int], columns: int) -> None:
    offsets = torch.tensor([0, *counts]).cumsum(0).int()
    rows = coded_rows(int(offsets[-1]), WIDTH)
    weight = mxfp4_weight(len(counts), columns, WIDTH)
    packed, references = pack_experts(*weight)
    out, _ = run(linear_cuda, rows, packed, references, offsets, columns)
    x = decode_units(rows.codes, rows.scales).double()
    for values, first, end in zip(mxfp4_values(*weight), offsets, offsets[1:], strict=False):
        exact = x[first:end] @ values.double().T
        error = (out[first:end].double() - exact).abs()
        assert (error <= error_bound(x[first:end], values.double()) + exact.abs() * 2.0**-8).all()
    expected = linear_reference.run(rows, packed, references, offsets, columns)
    assert (out != expected).float().mean() < 0.1
    for row in (0, len(x) - 1):
        one_row, one_offsets = alone(row, rows, offsets)
        one, _ = run(linear_cuda, one_row, packed, references, one_offsets, columns)
        assert_same_bits(one[:1], out[row : row + 1], f"row {row}")


@pytest.mark.parametrize("counts", [[0, 8, 20, 0, 4], [72], [116, 0, 132]])
def test_grouped_swiglu(run: KernelRunner, counts: list[int]) -> None:
    offsets, inner = torch.tensor([0, *counts]).cumsum(0).int(), 160
    num_rows = int(offsets[-1])
    rows, factors = coded_rows(num_rows, WIDTH), torch.rand(num_rows)
    weight = mxfp4_weight(len(counts), 2 * inner, WIDTH)
    packed, references = pack_experts(*weight, gated=True)
    rest = (10.0, inner)
    out, _ = run(swiglu_cuda, rows, packed, references, offsets, factors, *rest)
    x, values = (decode_units(r.codes, r.scales).double() for r in (rows, out))
    for matrix, first, end in zip(mxfp4_values(*weight).double(), offsets, offsets[1:], strict=False):
        product = x[first:end] @ matrix.T
        off = error_bound(x[first:end], matrix) + product.abs() * 2.0**-8
        (gate, up), (gate_off, up_off) = product.chunk(2, 1), off.chunk(2, 1)
        gate, up = torch.nn.functional.silu(gate.clamp(max=10.0)), up.clamp(-10.0, 10.0)
        exact = gate * up * factors[first:end, None]
        # The slope of silu is at most 1.1.
        off = 1.1 * gate_off * (up.abs() + up_off) + gate.abs() * up_off
        unit = out.scales[:, first:end].T.repeat_interleave(128, 1)[:, :inner] * 2.0**-10
        bound = 1.1 * (off * factors[first:end, None] + exact.abs() * 2.0**-4) + unit
        assert ((values[first:end] - exact).abs() <= bound).all()
    expected = swiglu_reference.run(rows, packed, references, offsets, factors, *rest)
    assert (values != decode_units(expected.codes, expected.scales)).double().mean() < 0.1
    row = num_rows - 1
    one_row, one_offsets = alone(row, rows, offsets)
    factor = factors[row : row + 1].expand(4).contiguous()
    one, _ = run(swiglu_cuda, one_row, packed, references, one_offsets, factor, *rest)
    assert_same_bits(one.codes[:1], out.codes[row : row + 1], f"codes of row {row}")
    assert_same_bits(one.scales[:, :1], out.scales[:, row : row + 1], f"scales of row {row}")


@pytest.mark.parametrize(("counts", "columns"), [([0, 140, 4, 20], 320), ([128], 256)])
def test_codes_in_place_of_packed_weights(
    run: KernelRunner, monkeypatch: pytest.MonkeyPatch, counts: list[int], columns: int
) -> None:
    """Many rows read a copy of the weights, with the same bits."""
    offsets = torch.tensor([0, *counts]).cumsum(0).int()
    num_rows = int(offsets[-1])
    rows, factors = coded_rows(num_rows, WIDTH), torch.rand(num_rows)
    monkeypatch.setattr(expert_wide, "MANY_ROWS", 1)
    plain = pack_experts(*mxfp4_weight(len(counts), columns, WIDTH))
    arguments = rows, *plain, offsets, columns
    expected, _ = run(linear_cuda, *arguments)
    found, _ = run(linear_cuda, *arguments, weight_codes(plain[0]))
    assert_same_bits(found, expected)
    gated = pack_experts(*mxfp4_weight(len(counts), columns, WIDTH), gated=True)
    arguments = rows, *gated, offsets, factors, 10.0, columns // 2
    expected, _ = run(swiglu_cuda, *arguments)
    found, _ = run(swiglu_cuda, *arguments, weight_codes(gated[0]))
    assert_same_bits(found.codes, expected.codes)
    assert_same_bits(found.scales, expected.scales)


def test_when_codes_are_read() -> None:
    """From a mean of rows on, and only where there are some."""
    codes, rows = torch.empty(2, 64, 64), RowCodes.empty(160, 64, torch.device("cpu"))
    assert expert_wide.serves(rows, 2, codes) and not expert_wide.serves(rows, 3, codes)
    assert not expert_wide.serves(rows, 2, None)
