"""gather_columns' kernel against its reference, bit for bit."""

from __future__ import annotations

import torch

from tests.support.compare import assert_same_bits
from tests.support.kernel_runs import KernelRunner
from tilelang_ops.memory.gather_columns import cuda, reference


def test_gather_columns(run_kernel: KernelRunner) -> None:
    src = torch.randn(3, 9)
    for k, width in ((1, 4), (5, 8), (200, 200)):
        index = torch.randint(0, 9, (k,))
        actual, _ = run_kernel(cuda, src, index, width)
        assert_same_bits(actual[:, :k], reference.run(src, index, width)[:, :k])
