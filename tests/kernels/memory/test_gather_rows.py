"""gather_rows' kernel against its reference, bit for bit."""

from __future__ import annotations

import pytest
import torch

from tests.support.compare import assert_same_bits
from tests.support.kernel_runs import KernelRunner
from tilelang_ops.memory.gather_rows import cuda, reference


@pytest.mark.parametrize(
    ("dtype", "width"), [(torch.bfloat16, 40), (torch.float32, 1), (torch.uint8, 3), (torch.bfloat16, 1032)]
)
def test_gather_rows(run_kernel: KernelRunner, dtype: torch.dtype, width: int) -> None:
    src = (100 * torch.rand(9, width)).to(dtype)
    for shape, divisor, index_type in (
        ((1,), 1, torch.int32),
        ((5, 7), 1, torch.int64),
        ((40,), 3, torch.int32),
    ):
        index = torch.randint(-2, 11 * divisor, shape).to(index_type)
        actual, _ = run_kernel(cuda, src, index, divisor)
        assert_same_bits(actual, reference.run(src, index, divisor))
