"""route_topk's kernel: the definition in float64, ties, images."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.support.compare import assert_same_bits
from tests.support.kernel_runs import KernelRunner
from tilelang_ops.moe.route_topk import cuda


def _weights(logits: Tensor, ids: Tensor, scale: float) -> Tensor:
    scores = torch.nn.functional.softplus(logits.double()).sqrt().gather(1, ids.long())
    return scores / (scores.sum(1, keepdim=True) + 1e-20) * scale


@pytest.mark.parametrize(("num_experts", "selected"), [(384, 6), (10, 3)])
def test_route_topk(
    run_kernel: KernelRunner, monkeypatch: pytest.MonkeyPatch, num_experts: int, selected: int
) -> None:
    scale = 1.5
    monkeypatch.setattr(cuda, "FEW_ROWS", 1)  # more are several to a block
    bias, image_bias = torch.randn(2, num_experts) / 8
    for num_rows in (1, 9):
        logits = 2 * torch.randn(num_rows, num_experts)
        for is_image in (None, torch.rand(num_rows) < 0.5)[: 1 if num_rows == 1 else 2]:
            (ids, weights), _ = run_kernel(cuda, logits, bias, selected, scale, image_bias, is_image)
            shift = bias if is_image is None else torch.where(is_image[:, None], image_bias, bias)
            joined = torch.nn.functional.softplus(logits.double()).sqrt() + shift.double()
            expected = joined.sort(dim=1, descending=True, stable=True).indices[:, :selected]
            assert_same_bits(ids, expected.int(), "ids")
            torch.testing.assert_close(weights.double(), _weights(logits, ids, scale), rtol=1e-5, atol=0)
    (one, one_weights), _ = run_kernel(cuda, logits[5:6], bias, selected, scale, None, None)
    (ids, weights), _ = run_kernel(cuda, logits, bias, selected, scale, None, None)
    assert_same_bits(one[0], ids[5], "a row alone")
    assert_same_bits(one_weights[0], weights[5], "a row alone")


def test_ties_and_zeros(run_kernel: KernelRunner) -> None:
    """Equal scores: the lower id first. Scores that are all zero: weights are finite."""
    logits = torch.tensor([0.0, 1.0, 0.0, 1.0, 1.0, -9.0, 0.0, 1.0, 0.0, 1.0]).repeat(2, 1)
    logits[1] = -200.0
    (ids, weights), _ = run_kernel(cuda, logits, torch.zeros(10), 3, 1.5, None, None)
    assert ids.tolist() == [[1, 3, 4], [0, 1, 2]]
    assert weights[1].isfinite().all() and torch.equal(weights[0], torch.full((3,), 0.5))
