"""redistribute's kernel against its reference, ties and all."""

from __future__ import annotations

import pytest
import torch

from tests.support.compare import assert_same_bits
from tests.support.kernel_runs import KernelRunner
from tilelang_ops.speculative.redistribute import cuda, reference

WIDTH = 5


@pytest.mark.parametrize("has_limits", [False, True])
@pytest.mark.parametrize("has_odds", [False, True])
def test_redistribute(run_kernel: KernelRunner, has_limits: bool, has_odds: bool) -> None:
    for num_seqs, levels in ((1, 3), (7, 2), (7, 1000), (140, 20)):
        num_before = num_seqs + 2
        survivals = torch.randint(0, levels + 1, (num_before, WIDTH)) / levels
        if not has_odds:
            survivals = survivals.cumprod(1)
        sources = torch.randperm(num_before)[:num_seqs].int().masked_fill(torch.rand(num_seqs) < 0.2, -1)
        limits = torch.randint(1, WIDTH + 2, (num_seqs,), dtype=torch.int32)
        most = int(limits.sum()) if has_limits else num_seqs * (WIDTH + 1)
        odds = torch.rand(WIDTH) + 0.5
        for num_rows in {num_seqs, (num_seqs + most) // 2, most}:
            args = (
                num_rows,
                sources,
                survivals,
                limits if has_limits else None,
                odds if has_odds else None,
            )
            actual = run_kernel(cuda, *args)[0]
            assert_same_bits(actual, reference.run(*args), f"{num_seqs=} {levels=} {num_rows=}")
