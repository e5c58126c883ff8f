"""select_entries' kernel: the columns of a sort, whatever the scores and the width."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.support.compare import assert_same_bits
from tests.support.kernel_runs import KernelRunner
from tilelang_ops.kv_index.select_entries import cuda, reference


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
    elif kind == "wide":
        x = x * torch.exp2(torch.randint(-140, 120, (rows, width)).float())
    return x


@pytest.mark.parametrize("kind", ["random", "ties", "holes", "close", "wide"])
def test_select_entries(run_kernel: KernelRunner, kind: str) -> None:
    for rows, width in ((1, 1), (2, 39), (3, 40), (2, 41), (2, 4096), (1, 9001)):
        given = scores(rows, width, kind)
        chosen, _ = run_kernel(cuda, given, 40)
        assert_same_bits(chosen, reference.run(given, 40), f"{kind}, {width} columns")


def test_more_equal_scores_than_the_list_holds(run_kernel: KernelRunner) -> None:
    given = torch.zeros(1, cuda.CAPACITY + 700)
    given[0, 5::13] = 1.0 + torch.arange(given[0, 5::13].numel()) % 3
    given[0, -1] = -1.0
    for k in (40, 700):
        chosen, _ = run_kernel(cuda, given, k)
        assert_same_bits(chosen, reference.run(given, k), f"{k} of many equals")
