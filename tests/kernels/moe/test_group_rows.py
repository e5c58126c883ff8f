"""The kernels around the experts' products against their references, bit for bit."""

from __future__ import annotations

import pytest
import torch

from tests.support.compare import assert_same_bits
from tests.support.kernel_runs import KernelRunner
from tilelang_ops.common.row_codes import RowCodes
from tilelang_ops.moe.combine_slots import cuda as combine
from tilelang_ops.moe.combine_slots import reference as combine_reference
from tilelang_ops.moe.gather_grouped import cuda as gather_grouped
from tilelang_ops.moe.gather_grouped import reference as gather_grouped_reference
from tilelang_ops.moe.gather_slots import cuda as gather
from tilelang_ops.moe.gather_slots import reference as gather_reference
from tilelang_ops.moe.group_rows import cuda, reference
from tilelang_ops.moe.group_rows.op import capacity

FIELDS = ("slots", "places", "offsets", "tile_experts")


@pytest.mark.parametrize(("num_experts", "tile", "one_block"), [(12, 4, 8), (300, 1, 1)])
def test_group_rows(
    run_kernel: KernelRunner, monkeypatch: pytest.MonkeyPatch, num_experts: int, tile: int, one_block: int
) -> None:
    monkeypatch.setattr(cuda, "ONE_BLOCK_ROUNDS", one_block)
    monkeypatch.setattr(cuda, "ROUNDS", 1)
    cases = [torch.randint(-1, num_experts + 1, (rows, 3)) for rows in (1, 2, 90, 600)]
    cases += [torch.full((200, 3), 7), torch.full((5, 3), -1)]
    for ids in cases:
        ids = ids.int()
        actual, _ = run_kernel(cuda, ids, num_experts, tile)
        expected = reference.run(ids, num_experts, tile)
        for name in FIELDS:
            assert_same_bits(getattr(actual, name), getattr(expected, name), name)
        kept = (ids >= 0) & (ids < num_experts)
        assert torch.equal(actual.slots[actual.places[kept].long()], kept.flatten().nonzero().flatten().int())


@pytest.mark.parametrize(
    ("num_slots", "num_experts", "tile"), [(1, 1, 1), (3, 5, 4), (24, 5, 4), (8, 384, 128)]
)
def test_capacity_holds_the_worst_case(num_slots: int, num_experts: int, tile: int) -> None:
    size = capacity(num_slots, num_experts, tile)
    alone = min(num_slots, num_experts)
    worst = alone - 1 + -(-(num_slots - alone + 1) // tile)  # one slot each, the rest at one expert
    assert worst * tile <= size and size % tile == 0


@pytest.mark.parametrize("is_weighted", [False, True])
def test_combine_slots(run_kernel: KernelRunner, is_weighted: bool) -> None:
    num_rows, k, width = 5, 3, 72
    source, result = (torch.float32, torch.bfloat16) if is_weighted else (torch.bfloat16, torch.bfloat16)
    outputs = torch.randn(20, width).to(source)
    places = torch.randint(-1, 20, (num_rows, k)).int()
    places[0] = -1
    outputs[19] = torch.nan  # an empty place may hold anything
    places[places == 19] = 3
    weights = torch.rand(num_rows, k) if is_weighted else None
    shared = None if is_weighted else torch.randn(num_rows, width).to(source)
    actual, _ = run_kernel(combine, outputs, places, weights, shared, result)
    expected = combine_reference.run(outputs, places, weights, shared, result)
    if is_weighted:  # products may be fused into the sums
        torch.testing.assert_close(actual.float(), expected.float(), rtol=2.0**-7, atol=1e-6)
    else:
        assert_same_bits(actual, expected)


def test_gather_slots(run_kernel: KernelRunner) -> None:
    rows, weights = torch.randn(6, 2112).bfloat16(), torch.rand(6, 3)
    slots = torch.tensor([17, 0, -1, 4, 4, -1, 9], dtype=torch.int32)
    filled = slots >= 0
    (actual, factors), _ = run_kernel(gather, rows, weights, slots)
    expected, expected_factors = gather_reference.run(rows, weights, slots)
    assert_same_bits(actual[filled], expected[filled], "rows")
    assert_same_bits(factors[filled], expected_factors[filled], "weights")


@pytest.mark.parametrize("rounds", [1, 2])
def test_gather_grouped(run_kernel: KernelRunner, monkeypatch: pytest.MonkeyPatch, rounds: int) -> None:
    """One launch for few slots, two or three for many."""
    monkeypatch.setattr(gather_grouped, "FEW_ROUNDS", 1)
    monkeypatch.setattr(gather_grouped, "ROUNDS", rounds)
    for num_rows in (1, 90, 150):
        rows, weights = torch.randn(num_rows, 96).bfloat16(), torch.rand(num_rows, 3)
        ids = torch.randint(-1, 6, (num_rows, 3)).int()
        actual, _ = run_kernel(gather_grouped, rows, weights, ids, 5)
        expected = gather_grouped_reference.run(rows, weights, ids, 5)
        assert_same_bits(actual.places, expected.places, "places")
        assert_same_bits(actual.offsets, expected.offsets, "offsets")
        filled = slice(0, int(expected.offsets[-1]))
        assert_same_bits(actual.rows[filled], expected.rows[filled], "rows")
        assert_same_bits(actual.factors[filled], expected.factors[filled], "factors")
        if num_rows != 90:
            coded = RowCodes.encode(torch.randn(num_rows, 128))
            actual, _ = run_kernel(gather_grouped, coded, weights, ids, 5)
            expected = gather_grouped_reference.run(coded, weights, ids, 5)
            assert_same_bits(actual.rows[filled], expected.rows[filled], "rows of codes")
    empty = gather_grouped.run(rows[:0], weights[:0], ids[:0], 5)
    assert empty.rows.shape == (0, 96) and not empty.offsets.any()
