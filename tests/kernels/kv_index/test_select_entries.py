"""select_entries' kernel: the columns of a sort, whatever the scores and the width."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.support.compare import assert_same_bits
from tests.support.kernel_runs import KernelRunner
from tilelang_ops.kv_index.select_entries import cuda, reference

K = 40
WIDE = cuda.STEP + cuda.KEEP + 1500  # more than the list holds: a cut comes from a sample


def scores(rows: int, width: int, kind: str) -> Tensor:
    """Scores with the difficulties named by `kind`."""
    x = torch.randn(rows, width)
    if kind == "ties":
        x = (x * 2).round().relu() + 0.0
        x[0] = -x[0].abs() * 0.0  # all equal, -0 and 0
    elif kind == "holes":
        x[torch.rand(rows, width) < 0.9] = -torch.inf
        x[0] = -torch.inf
    elif kind == "close":
        x = 1.0 + torch.randint(0, 40, (rows, width)) * 2.0**-23
        x[0, 0], x[0, -1] = (
            torch.nan,
            -torch.nan,
        )  # above all, and never chosen
    elif kind == "ascending":  # the list fills up again and again
        x = x.sort(dim=1).values
    return x


@pytest.mark.parametrize("kind", ["random", "ties", "holes", "close", "ascending"])
def test_select_entries(run_kernel: KernelRunner, kind: str) -> None:
    """Widths that are loaded one by one or in fours, below k and above what the list holds."""
    for rows, width in ((1, 1), (2, 41), (1, 2052), (1, WIDE)):
        given = scores(rows, width, kind)
        chosen, _ = run_kernel(cuda, given, K)
        assert_same_bits(chosen, reference.run(given, K), f"{kind}, {width} columns")


def test_cut_that_is_too_high(run_kernel: KernelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sample holds all that is large, and that is less than k: the row is read again."""
    monkeypatch.setattr(cuda, "SPARE", 24)
    given = torch.rand(1, WIDE) - 1
    for warp in range(2):  # in the samples of 36 threads
        start = warp * cuda.SAMPLE * WIDE // (cuda.WARPS * cuda.SAMPLE)
        given[0, start : start + 18] = 1 + torch.rand(18)
    assert cuda.THREADS * (1 - (1 - (K + 1 + cuda.SPARE) / WIDE) ** cuda.SAMPLE) < 36 < K
    chosen, _ = run_kernel(cuda, given, K + 1)
    assert_same_bits(chosen, reference.run(given, K + 1))


def test_entries_of_blocks(run_kernel: KernelRunner) -> None:
    """Columns stand for the entries of the row's blocks."""
    given = scores(2, 96, "ties")
    blocks = torch.stack([torch.randperm(40)[:12].sort().values for _ in given]).int()
    chosen, _ = run_kernel(cuda, given, K, blocks, 8)
    assert_same_bits(chosen, reference.run(given, K, blocks, 8))
