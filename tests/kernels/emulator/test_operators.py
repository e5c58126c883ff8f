"""Tile operators, threads and shuffles of the emulator against torch."""

from __future__ import annotations

import functools
import operator

import pytest
import torch

from tests.kernels.emulator import programs
from tests.support.emulator import EmulatedProgram


@pytest.mark.parametrize(
    ("operands", "transpose_a", "transpose_b", "clear"),
    [
        ("bfloat16", False, True, True),
        ("bfloat16", True, False, False),
        ("float8_e4m3fn", False, False, True),
    ],
)
def test_gemm(operands: str, transpose_a: bool, transpose_b: bool, clear: bool) -> None:
    m, n, k = 16, 24, 32
    a, b = torch.randn(m, k).to(getattr(torch, operands)), torch.randn(k, n).to(getattr(torch, operands))
    start = torch.randn(m, n)
    out = start.clone()
    EmulatedProgram(programs.gemm(m, n, k, operands, "float32", transpose_a, transpose_b, clear))(
        a.t().contiguous() if transpose_a else a, b.t().contiguous() if transpose_b else b, out
    )
    expected = a.double() @ b.double() + (0 if clear else start.double())
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


def test_tensor_cores_count_subnormals_in_bfloat16_as_0() -> None:
    """Not those in float16; on a GPU alike."""
    for operands, smallest in (("bfloat16", 2.0**-126), ("float16", 2.0**-14)):
        a = torch.full((16, 16), smallest, dtype=getattr(torch, operands))
        a[:, 1::2] /= 2
        b, out = torch.ones_like(a), torch.empty(16, 16)
        EmulatedProgram(programs.gemm(16, 16, 16, operands, "float32", False, False, True))(a, b, out)
        expected = smallest * (8 if operands == "bfloat16" else 12)
        assert torch.equal(out, torch.full_like(out, expected)), operands


@pytest.mark.parametrize(("axis", "clear"), [(0, True), (1, False)])
def test_float_reductions(axis: int, clear: bool) -> None:
    x = torch.randn(6, 10)
    start = torch.randn(5, 10 if axis == 0 else 6)
    expected = {
        "sum": (x.sum(axis), torch.add),
        "max": (x.amax(axis), torch.maximum),
        "min": (x.amin(axis), torch.minimum),
        "abssum": (x.abs().sum(axis), torch.add),
        "absmax": (x.abs().amax(axis), torch.maximum),
    }
    out = start.clone()
    EmulatedProgram(programs.reduce(6, 10, "float32", tuple(expected), axis, clear))(x, out)
    for k, (value, join) in enumerate(expected.values()):
        torch.testing.assert_close(out[k], value if clear else join(value, start[k]))


def test_bit_reductions() -> None:
    x = torch.randint(0, 2**31, (4, 6), dtype=torch.int32)
    joins = {"bitand": operator.and_, "bitor": operator.or_, "bitxor": operator.xor}
    out = torch.zeros(3, 4, dtype=torch.int32)
    EmulatedProgram(programs.reduce(4, 6, "int32", tuple(joins), 1, True))(x, out)
    for k, join in enumerate(joins.values()):
        assert out[k].tolist() == [functools.reduce(join, row) for row in x.tolist()]


@pytest.mark.parametrize("reverse", [False, True])
def test_scan(reverse: bool) -> None:
    x = torch.randint(-9, 9, (3, 7), dtype=torch.int32)
    out = torch.empty_like(x)
    EmulatedProgram(programs.scan(3, 7, reverse))(x, out)
    expected = x.flip(1).cumsum(1).flip(1) if reverse else x.cumsum(1)
    assert torch.equal(out, expected.int())


@pytest.mark.parametrize("reverse", [False, True])
def test_shuffles_stay_in_their_warp(reverse: bool) -> None:
    x = torch.randn(96)
    out = torch.empty(3)
    EmulatedProgram(programs.warp_sums(96))(x, out, reverse=reverse)
    torch.testing.assert_close(out, x.view(3, 32).sum(1))


@pytest.mark.parametrize("reverse", [False, True])
def test_votes(reverse: bool) -> None:
    x = torch.randint(0, 99, (64,), dtype=torch.int32)
    ballot, count = torch.empty(2, dtype=torch.int64), torch.empty(1, dtype=torch.int32)
    EmulatedProgram(programs.votes(64))(x, ballot, count, reverse=reverse)
    odd = (x % 2).long().view(2, 32)
    assert ballot.tolist() == (odd << torch.arange(32)).sum(1).tolist()
    assert count.item() == odd.sum().item()


def test_barrier_hands_values_between_threads() -> None:
    x = torch.randint(0, 99, (64,), dtype=torch.int32)
    for reverse in (False, True):
        out = torch.empty_like(x)
        EmulatedProgram(programs.exchange(64, has_barrier=True))(x, out, reverse=reverse)
        assert torch.equal(out, x.flip(0))


@pytest.mark.parametrize("reverse", [False, True])
def test_arriving_at_a_named_barrier(reverse: bool) -> None:
    x = torch.randint(0, 256, (32, 4), dtype=torch.uint8)
    out = torch.empty(32, dtype=torch.uint32)
    EmulatedProgram(programs.relay(arrives=True))(x.view(torch.uint32)[:, 0], out, reverse=reverse)
    assert torch.equal(out[:, None].view(torch.uint8), x.flip(1))


def test_waiting_for_a_copy() -> None:
    x, out = torch.randn(32), torch.empty(32)
    EmulatedProgram(programs.awaited_copies(copies=1, waits=1))(x, out, reverse=True)  # who waits is first
    assert torch.equal(out, x)


def test_atomics_count_all() -> None:
    x = torch.randint(0, 99, (50,), dtype=torch.int32)
    counts = torch.zeros(4, dtype=torch.int32)
    EmulatedProgram(programs.counters())(x, counts)
    assert torch.equal(counts, (x % 4).bincount(minlength=4).int())


def test_products_fuse_only_where_the_program_lets_them() -> None:
    """(1 + e)(1 - e) - 1 is -e^2 fused and 0 rounded."""
    a, b = torch.full((1,), 1 + 2.0**-13), torch.full((1,), 1 - 2.0**-13)
    c = torch.full((1,), -1.0)
    for contract, expected in ((False, 0.0), (True, -(2.0**-26))):
        plain, exact = torch.empty(1), torch.empty(1)
        EmulatedProgram(programs.multiply_add(), contract=contract)(a, b, c, plain, exact)
        assert (plain.item(), exact.item()) == (expected, 0.0)
