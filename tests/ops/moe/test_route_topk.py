"""route_topk: golden block, brute force, ties, the bias of images, single rows."""

from __future__ import annotations

import math

import pytest
import torch

from tests.support.compare import assert_same_bits, check_against_cpu
from tilelang_ops.moe import route_topk


def test_golden_block(units) -> None:
    block = units.under("router")
    ids, weights = route_topk(
        block["logits"], block["bias"], 6, 1.5, block["bias_vl"], block["is_image"].bool()
    )
    assert torch.equal(ids, block["ids"])
    torch.testing.assert_close(weights, block["weights"], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(("experts", "selected"), [(1, 1), (8, 3), (12, 12), (384, 6)])
def test_against_brute_force(experts: int, selected: int) -> None:
    logits, bias = 3 * torch.randn(20, experts), 0.3 * torch.randn(experts)
    ids, weights = route_topk(logits, bias, selected, 1.5)
    for row in range(20):
        scores = [math.sqrt(math.log1p(math.exp(v))) for v in logits[row].tolist()]
        order = sorted(range(experts), key=lambda e: (-(scores[e] + bias[e].item()), e))[:selected]
        total = sum(scores[e] for e in order)
        assert ids[row].tolist() == order
        assert weights[row].tolist() == pytest.approx([scores[e] / total * 1.5 for e in order], rel=1e-5)


def test_lower_expert_first_among_equals() -> None:
    logits = torch.zeros(4, 300)
    logits[1, 7] = 1.0
    ids, weights = route_topk(logits, torch.zeros(300), 3, 1.0)
    assert ids.tolist() == [[0, 1, 2], [7, 0, 1], [0, 1, 2], [0, 1, 2]]
    assert weights[0].tolist() == pytest.approx([1 / 3] * 3)


def test_bias_chooses_and_does_not_weigh() -> None:
    logits = torch.tensor([[5.0, 0.0, 0.0]])
    ids, weights = route_topk(logits, torch.tensor([-100.0, 0.0, 1.0]), 2, 2.0)
    assert ids.tolist() == [[2, 1]] and weights.tolist() == [[1.0, 1.0]]


def test_scores_of_zero_give_finite_weights() -> None:
    _, weights = route_topk(torch.full((1, 4), -200.0), torch.zeros(4), 2, 1.5)
    assert torch.isfinite(weights).all()


def test_bias_of_images() -> None:
    logits, bias, image_bias = torch.randn(12, 16), torch.randn(16), torch.randn(16)
    is_image = torch.arange(12) % 3 == 0
    ids, weights = route_topk(logits, bias, 4, 1.5, image_bias, is_image)
    for rows, its_bias in ((is_image, image_bias), (~is_image, bias)):
        expected_ids, expected_weights = route_topk(logits[rows], its_bias, 4, 1.5)
        assert torch.equal(ids[rows], expected_ids)
        assert_same_bits(weights[rows], expected_weights)


def test_row_alone_is_row_in_batch() -> None:
    logits, bias = torch.randn(130, 24), torch.randn(24)
    ids, weights = route_topk(logits, bias, 6, 1.5)
    for start, stop in [(0, 1), (129, 130), (5, 6), (3, 20), (1, 65), (2, 130)]:
        part_ids, part_weights = route_topk(logits[start:stop], bias, 6, 1.5)
        assert torch.equal(part_ids, ids[start:stop])
        assert_same_bits(part_weights, weights[start:stop], f"rows {start}..{stop}")


def test_no_rows() -> None:
    ids, weights = route_topk(torch.empty(0, 8), torch.zeros(8), 2, 1.5)
    assert ids.shape == weights.shape == (0, 2)


def test_on_device(device: str) -> None:
    check_against_cpu(
        route_topk, torch.randn(9, 16), torch.randn(16), 4, 1.5, device=device, rtol=1e-6, atol=1e-6
    )
