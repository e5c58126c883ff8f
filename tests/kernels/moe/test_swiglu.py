"""The activation's kernel against float64, its bytes against the encoding of its own values."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.support.compare import assert_same_bits
from tests.support.kernel_runs import KernelRunner
from tests.support.row_codes import assert_same_units
from tilelang_ops.common.numerics import decode_fp8, encode_fp8
from tilelang_ops.common.row_codes import RowCodes
from tilelang_ops.moe.swiglu import cuda as swiglu
from tilelang_ops.moe.swiglu_quantize import cuda as swiglu_quantize

LIMIT = 2.5


def _expected(gate_up: Tensor, weight: Tensor | None) -> Tensor:
    gate, up = gate_up.double().chunk(2, 1)
    out = torch.nn.functional.silu(gate.clamp(max=LIMIT)) * up.clamp(-LIMIT, LIMIT)
    return out if weight is None else out * weight.double().view(-1, 1)


@pytest.mark.parametrize(("source", "width"), [(torch.float32, 300), (torch.bfloat16, 1088)])
@pytest.mark.parametrize("is_weighted", [False, True])
def test_swiglu(run_kernel: KernelRunner, source: torch.dtype, width: int, is_weighted: bool) -> None:
    for num_rows in (1, 5, 0):
        gate_up = (4 * torch.randn(num_rows, 2 * width)).to(source)
        weight = torch.rand(num_rows) if is_weighted else None
        actual, _ = run_kernel(swiglu, gate_up, LIMIT, torch.bfloat16, weight)
        torch.testing.assert_close(
            actual.double(), _expected(gate_up, weight), rtol=2.0**-8, atol=1e-6, check_dtype=False
        )


def test_swiglu_quantize(run_kernel: KernelRunner) -> None:
    num_rows, width = 6, 1088  # more than a block's tile
    gate_up = (4 * torch.randn(num_rows, 2 * width)).bfloat16()
    gate_up[2, :40] = 0.0
    weights = torch.rand(9)
    slots = torch.tensor([8, 0, -1, 3, 4, 2], dtype=torch.int32)
    (codes, scales), _ = run_kernel(swiglu_quantize, gate_up, LIMIT, weights, slots)
    kept = slots >= 0
    gate_up, weight = gate_up[kept], weights[slots[kept].long()]
    values, _ = run_kernel(swiglu, gate_up, LIMIT, torch.bfloat16, weight)
    expected_codes, expected_scales = encode_fp8(values)
    assert_same_bits(codes[kept], expected_codes, "codes")
    assert_same_bits(scales[kept], expected_scales, "scales")
    rounded, _ = run_kernel(swiglu, gate_up, LIMIT, torch.bfloat16, weight, True)
    assert_same_bits(rounded, decode_fp8(expected_codes, expected_scales).bfloat16(), "rounded rows")
    gate_up = (4 * torch.randn(2, 2 * 1280)).bfloat16()
    values, _ = run_kernel(swiglu, gate_up, LIMIT, torch.bfloat16, None)
    coded, _ = run_kernel(swiglu_quantize, gate_up, LIMIT, None, None, True)
    assert_same_units(RowCodes(*coded), values)
