"""rotate's kernel against its reference in float64."""

from __future__ import annotations

import torch

from tests.support.compare import assert_same_bits
from tests.support.kernel_runs import KernelRunner
from tilelang_ops.projection.rotate import cuda, reference


def test_rotate(run_kernel: KernelRunner) -> None:
    for source, heads, width, pairs, inverse in (
        (torch.bfloat16, 3, 32, 8, False),
        (torch.float32, 1, 12, 3, True),
    ):
        for num_rows in (1, 70):
            x = torch.randn(num_rows, heads, width).to(source)
            angles = 1000 * torch.rand(num_rows, pairs)
            cos, sin = angles.cos(), angles.sin()
            _, (actual, *_) = run_kernel(cuda, x, cos, sin, inverse)
            expected = x.double()
            reference.run(expected, cos.double(), sin.double(), inverse)
            rtol = 2.0**-8 if source == torch.bfloat16 else 1e-6
            torch.testing.assert_close(actual.double(), expected, rtol=rtol, atol=1e-6)
            assert_same_bits(actual[..., : width - 2 * pairs], x[..., : width - 2 * pairs], "other channels")
        _, (alone, *_) = run_kernel(cuda, x[5:6], cos[5:6], sin[5:6], inverse)
        assert_same_bits(alone[0], actual[5], "a row alone")
