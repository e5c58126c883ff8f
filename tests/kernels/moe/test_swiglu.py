"""swiglu's kernel against its reference."""

from __future__ import annotations

import pytest
import torch

from tests.support.kernel_runs import KernelRunner
from tilelang_ops.moe.swiglu import cuda, reference


@pytest.mark.parametrize(("num_rows", "width"), [(1, 8), (5, 300), (0, 16)])
@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_weighted", [False, True])
def test_swiglu(
    run_kernel: KernelRunner, num_rows: int, width: int, source: torch.dtype, is_weighted: bool
) -> None:
    gate_up = (4 * torch.randn(num_rows, 2 * width)).to(source)
    weight = torch.rand(num_rows) if is_weighted else None
    actual, _ = run_kernel(cuda, gate_up, 2.5, torch.bfloat16, weight)
    expected = reference.run(gate_up, 2.5, torch.bfloat16, weight)
    torch.testing.assert_close(actual, expected, rtol=2.0**-8, atol=1e-6)
