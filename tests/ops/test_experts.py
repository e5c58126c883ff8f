"""Routed experts: against float64, bfloat16 and FP8 roundings, slot order, rows that ignore others."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from deepinfer.config import ARITHMETICS
from deepinfer.layers.experts import Experts
from deepinfer.ops.experts import routed_experts, routed_experts_reference
from tests.support.compare import assert_same_bits
from tilelang_ops.common.dispatch import UnsupportedOpError


def inputs(rows: int, slots: int, experts: int, hidden: int, inner: int) -> tuple[Tensor, ...]:
    """x, ids (different in each row), weights, w13, w2."""
    ids = (
        torch.stack([torch.randperm(experts)[:slots] for _ in range(rows)]) if rows else torch.zeros(0, slots)
    )
    w13 = torch.randn(experts, 2 * inner, hidden) * hidden**-0.5
    w2 = torch.randn(experts, hidden, inner) * inner**-0.5
    return 2 * torch.randn(rows, hidden), ids.int(), torch.rand(rows, slots), w13, w2


@pytest.mark.parametrize("limit", [0.0, 0.5])
@pytest.mark.parametrize("rows", [0, 1, 2, 7, 49, 200])
@pytest.mark.parametrize(
    ("slots", "experts", "hidden", "inner"), [(1, 1, 16, 32), (2, 3, 40, 24), (4, 16, 64, 96)]
)
def test_against_float64(
    instruction_set: str, rows: int, slots: int, experts: int, hidden: int, inner: int, limit: float
) -> None:
    args = inputs(rows, slots, experts, hidden, inner)
    out = routed_experts(*args, limit)
    assert out.shape == (rows, hidden) and out.dtype == torch.float32
    expected = routed_experts_reference(*args, limit, dtype=torch.float64)
    torch.testing.assert_close(out.double(), expected, rtol=1e-6, atol=3e-6)


def test_activation_of_golden_block(instruction_set: str, units) -> None:
    """Identity matrices leave the activation and its routing weight."""
    block = units.under("swiglu")
    rows, inner = block["out"].shape
    out = routed_experts(
        block["gate_and_up"],
        torch.zeros(rows, 1, dtype=torch.int32),
        block["weight"],
        torch.eye(2 * inner)[None],
        torch.eye(inner).repeat(2, 1)[None],
        10.0,
    )
    torch.testing.assert_close(out[:, :inner], block["out"], rtol=1e-6, atol=1e-6)


def test_clamps(instruction_set: str) -> None:
    """The gate is cut above only, the up value on both sides."""
    gate = torch.tensor([20.0, 20.0, -20.0, 1.0, -300.0, 300.0]).repeat_interleave(32)
    up = torch.tensor([20.0, -20.0, 20.0, 2.0, 1.0, 1.0]).repeat_interleave(32)
    x, inner = torch.cat([gate, up])[None], gate.numel()
    w2 = torch.eye(inner).repeat(2, 1)[None]
    one = torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, 1)
    out = routed_experts(x, *one, torch.eye(2 * inner)[None], w2, 10.0)[0, :inner:32]

    def silu(v: float) -> float:
        return v / (1 + torch.exp(torch.tensor(-v, dtype=torch.float64)).item())

    expected = [silu(10) * 10, silu(10) * -10, silu(-20) * 10, silu(1) * 2, 0.0, silu(10)]
    assert out.tolist() == pytest.approx(expected, rel=3e-7, abs=1e-30)


@pytest.mark.parametrize("round_inputs", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_roundings(instruction_set: str, dtype: torch.dtype, round_inputs: bool) -> None:
    """With the same rounding points only a value between two codes may fall on the other side, rarely."""
    x, *rest = inputs(64, 4, 8, 64, 96)
    x = x.to(dtype)
    out = routed_experts(x, *rest, 2.5, round_inputs=round_inputs).double()
    expected = routed_experts_reference(x, *rest, 2.5, round_inputs=round_inputs, dtype=torch.float64)
    error = (out - expected).abs()
    assert (error > 1e-5).double().mean() < 0.05 and error.max() < 0.05
    if dtype is torch.bfloat16 or round_inputs:  # the roundings themselves are far from rare
        exact = routed_experts_reference(x.float(), *rest, 2.5, dtype=torch.float64)
        assert ((out - exact).abs() > 1e-5).double().mean() > 0.9


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_slots_add_in_order(instruction_set: str, dtype: torch.dtype) -> None:
    x, ids, weights, w13, w2 = inputs(23, 5, 7, 48, 32)
    x = x.to(dtype)
    total = torch.zeros(23, 48)
    for slot in range(5):
        total += routed_experts(x, ids[:, slot : slot + 1], weights[:, slot : slot + 1], w13, w2, 1.0)
    assert_same_bits(routed_experts(x, ids, weights, w13, w2, 1.0), total)


@pytest.mark.parametrize(("dtype", "round_inputs"), [(torch.float32, False), (torch.bfloat16, True)])
def test_rows_ignore_their_batch(with_threads, dtype: torch.dtype, round_inputs: bool) -> None:
    x, ids, weights, w13, w2 = inputs(150, 4, 8, 128, 64)
    x = x.to(dtype)
    with_threads(1)
    whole = routed_experts(x, ids, weights, w13, w2, 2.5, round_inputs=round_inputs)
    for num_threads, size in itertools.product((1, 2, 3, 4), (1, 2, 7, 49, 150)):
        with_threads(num_threads)
        parts = [
            routed_experts(*part, w13, w2, 2.5, round_inputs=round_inputs)
            for part in zip(x.split(size), ids.split(size), weights.split(size))
        ]
        assert_same_bits(torch.cat(parts), whole, f"{num_threads=} {size=}")
    order = torch.randperm(150)
    shuffled = routed_experts(x[order], ids[order], weights[order], w13, w2, 2.5, round_inputs=round_inputs)
    assert_same_bits(shuffled, whole[order])
    same = torch.full_like(ids, 3)  # all rows, all slots on one expert
    alone = [routed_experts(x[i : i + 1], same[:1], weights[i : i + 1], w13, w2, 2.5) for i in range(150)]
    assert_same_bits(routed_experts(x, same, weights, w13, w2, 2.5), torch.cat(alone))


def test_bfloat16_weights_hold_the_same_values(instruction_set: str) -> None:
    x, ids, weights, w13, w2 = inputs(60, 3, 5, 64, 32)
    w13, w2 = w13.bfloat16(), w2.bfloat16()
    expected = routed_experts(x, ids, weights, w13.float(), w2.float(), 2.0)
    assert_same_bits(routed_experts(x, ids, weights, w13, w2, 2.0), expected)


def test_strided_rows(instruction_set: str) -> None:
    x, ids, weights, w13, w2 = inputs(9, 2, 4, 32, 32)
    wide = torch.randn(18, 50)
    wide[::2, 7:39] = x
    assert_same_bits(
        routed_experts(wide[::2, 7:39], ids, weights, w13, w2, 1.0),
        routed_experts(x, ids, weights, w13, w2, 1.0),
    )


def test_a_fault_stays_in_its_row(instruction_set: str) -> None:
    x, ids, weights, w13, w2 = inputs(6, 2, 4, 32, 32)
    x[2, 5] = torch.nan
    for round_inputs in (False, True):
        out = routed_experts(x, ids, weights, w13, w2, 1.0, round_inputs=round_inputs)
        assert torch.isnan(out).all(1).tolist() == [False, False, True, False, False, False]
        assert torch.isfinite(out[[0, 1, 3, 4, 5]]).all()


@pytest.mark.parametrize("bad", [-1, 4])
def test_expert_ids_are_checked(bad: int) -> None:
    x, ids, weights, w13, w2 = inputs(3, 2, 4, 32, 32)
    ids[1, 1] = bad
    with pytest.raises(IndexError, match=f"expert id {bad}"):
        routed_experts(x, ids, weights, w13, w2, 1.0)


def test_other_devices_are_refused() -> None:
    args = [tensor.to("meta") for tensor in inputs(2, 1, 2, 32, 32)]
    with pytest.raises(UnsupportedOpError, match="meta"):
        routed_experts(*args, 1.0)


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("name", ["float32", "w8a8", "bfloat16"])
def test_layer_follows_the_arithmetic(name: str, quantized: bool) -> None:
    x, ids, weights, w13, w2 = inputs(5, 2, 4, 64, 32)
    arithmetic = ARITHMETICS[name]
    x = x.to(getattr(torch, arithmetic.compute_dtype))
    expected = routed_experts(x, ids, weights, w13, w2, 2.5, round_inputs=name == "w8a8" and quantized)
    assert_same_bits(Experts(w13, w2, quantized)(x, ids, weights, 2.5, arithmetic), expected)
