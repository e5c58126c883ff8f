"""Products: against float64, the stated order of summation, roundings, and rows that ignore their batch."""

from __future__ import annotations

import itertools
import os
import threading

import pytest
import torch
from torch import Tensor

from deepinfer.ops import cpu
from deepinfer.ops.gemm import grouped_columns, grouped_linear, grouped_linear_reference, linear
from deepinfer.ops.quant import round_fp8
from tests.support.compare import assert_same_bits
from tilelang_ops.common.dispatch import UnsupportedOpError

EPS = 2.0**-24


def assert_close(actual: Tensor, x: Tensor, weight: Tensor) -> None:
    """Each element within the error bound of its own sum: K / 16 in a lane and four between lanes."""
    x, weight = x.double(), weight.double()
    bound = (x.shape[1] / 16 + 6) * EPS * (x.abs() @ weight.abs().T)
    error = (actual.double() - x @ weight.T).abs()
    assert bool((error <= bound).all()), f"{(error / bound).max()=}"


@pytest.mark.parametrize("rows", [0, 1, 2, 3, 4, 5, 47, 48, 49, 98])
@pytest.mark.parametrize(
    ("columns", "width"), [(1, 1), (3, 15), (4, 16), (7, 17), (8, 31), (9, 130), (130, 64)]
)
def test_against_float64(instruction_set: str, rows: int, columns: int, width: int) -> None:
    x, weight = torch.randn(rows, width), torch.randn(columns, width)
    out = linear(x, weight)
    assert out.shape == (rows, columns) and out.dtype == torch.float32
    assert_close(out, x, weight)


@pytest.mark.parametrize("shape", [(5, 0, 16), (5, 3, 0), (0, 3, 16)])
def test_empty(instruction_set: str, shape: tuple[int, int, int]) -> None:
    rows, columns, width = shape
    assert_same_bits(
        linear(torch.randn(rows, width), torch.randn(columns, width)), torch.zeros(rows, columns)
    )


@pytest.mark.parametrize("rows", [1, 3, 4])
def test_order_of_summation(instruction_set: str, rows: int) -> None:
    """A large value swallows what is added to it: where its opposite stands decides what survives."""
    big, weight = 2.0**30, torch.ones(9, 64)
    same_lane = torch.zeros(rows, 64)  # lane 0 sees big, 1, -big: the 1 is lost
    same_lane[:, [0, 16, 32]] = torch.tensor([big, 1.0, -big])
    assert_same_bits(linear(same_lane, weight), torch.zeros(rows, 9))
    late = torch.zeros(rows, 64)  # lane 0 sees big, -big, 1
    late[:, [0, 16, 32]] = torch.tensor([big, -big, 1.0])
    assert_same_bits(linear(late, weight), torch.ones(rows, 9))
    for near, far in ((8, 4), (4, 2), (2, 1)):  # lanes 0 and `near` are added before lane `far` joins
        tree = torch.zeros(rows, 64)
        tree[:, [0, near, far]] = torch.tensor([big, -big, 1.0])
        assert_same_bits(linear(tree, weight), torch.ones(rows, 9))
        tree[:, [0, near, far]] = torch.tensor([big, 1.0, -big])
        assert_same_bits(linear(tree, weight), torch.zeros(rows, 9))


@pytest.mark.parametrize("out_dtype", [None, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dtypes_round_once(instruction_set: str, dtype: torch.dtype, out_dtype: torch.dtype | None) -> None:
    x, weight = torch.randn(21, 96).to(dtype), torch.randn(37, 96)
    exact = linear(x.float(), weight)
    assert_same_bits(linear(x, weight, out_dtype), exact.to(out_dtype or dtype))


@pytest.mark.parametrize("rows", [1, 2, 3, 50])
@pytest.mark.parametrize("width", [5, 16, 77])
def test_bfloat16_weights_hold_the_same_values(instruction_set: str, rows: int, width: int) -> None:
    x, weight = torch.randn(rows, width), torch.randn(19, width).bfloat16()
    assert_same_bits(linear(x, weight), linear(x, weight.float()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_inputs_rounded_to_fp8(instruction_set: str, units, dtype: torch.dtype) -> None:
    block = units.under("formats")
    identity = torch.eye(block["input"].shape[1])
    rounded = linear(block["input"].to(dtype), identity, torch.float32, round_inputs=True)
    assert torch.equal(rounded, block["gemm_input/rounded"].float())
    # All magnitudes, values between codes and at their midpoints, groups of zeros, a huge one.
    x = torch.cat([torch.randn(40, 512) * torch.logspace(-12, 12, 40)[:, None], torch.zeros(1, 512)])
    x[3, :200] = torch.arange(200) / 16
    x[4, 7] = 1.5e38
    x[5, :32] = 448.0
    x = x.to(dtype)
    assert torch.equal(linear(x, identity, torch.float32, round_inputs=True), round_fp8(x).float())


def test_faults_reach_the_output(instruction_set: str) -> None:
    x = torch.randn(4, 64)
    x[1, 40], x[2, 3], x[3, 5] = torch.nan, torch.inf, -torch.inf
    out = linear(x, torch.ones(5, 64))
    assert torch.isfinite(out[0]).all() and torch.isnan(out[1]).all()
    assert torch.equal(out[2], torch.full((5,), torch.inf)) and torch.equal(
        out[3], torch.full((5,), -torch.inf)
    )
    assert torch.isnan(linear(x, torch.ones(5, 64), round_inputs=True)[1:]).all()
    assert torch.isnan(linear(x, torch.ones(5, 64), torch.bfloat16)[1]).all()


@pytest.mark.parametrize("round_inputs", [False, True])
@pytest.mark.parametrize(("columns", "width"), [(24, 1024), (300, 96), (2048, 128)])
def test_rows_ignore_their_batch(with_threads, columns: int, width: int, round_inputs: bool) -> None:
    x, weight = torch.randn(101, width), torch.randn(columns, width)
    with_threads(1)
    whole = linear(x, weight, round_inputs=round_inputs)
    for num_threads, size in itertools.product((1, 2, 3, 4), (1, 2, 3, 5, 50, 101)):
        with_threads(num_threads)
        parts = [linear(part, weight, round_inputs=round_inputs) for part in x.split(size)]
        assert_same_bits(torch.cat(parts), whole, f"{num_threads=} {size=}")
    shuffled = torch.randperm(101)
    assert_same_bits(linear(x[shuffled], weight, round_inputs=round_inputs), whole[shuffled])


def test_strides(instruction_set: str) -> None:
    wide, weight = torch.randn(40, 200), torch.randn(17, 64)
    view = wide[3:38:2, 5:69]
    assert_same_bits(linear(view, weight), linear(view.contiguous(), weight))
    assert_same_bits(linear(wide[:, ::2][:, :64], weight), linear(wide[:, ::2][:, :64].contiguous(), weight))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("round_inputs", [False, True])
@pytest.mark.parametrize("rows", [0, 1, 51])
def test_grouped_columns(instruction_set: str, dtype: torch.dtype, round_inputs: bool, rows: int) -> None:
    x, weight = torch.randn(rows, 3, 64).to(dtype), torch.randn(3 * 20, 64)
    out = grouped_columns(x, weight, round_inputs=round_inputs)
    assert out.shape == (rows, 3, 20) and out.is_contiguous()
    for group in range(3):
        alone = linear(x[:, group], weight[group * 20 : (group + 1) * 20], round_inputs=round_inputs)
        assert_same_bits(out[:, group].contiguous(), alone)
    strided = torch.randn(rows, 4, 64).to(dtype)[:, 1:]
    assert_same_bits(grouped_columns(strided, weight), grouped_columns(strided.contiguous(), weight))


@pytest.mark.parametrize("sizes", [[4], [0, 3, 0], [50, 1, 0, 97, 2]])
def test_grouped_linear(instruction_set: str, sizes: list[int]) -> None:
    offsets = torch.tensor([0, *itertools.accumulate(sizes)], dtype=torch.int32)
    x, weights = torch.randn(sum(sizes), 40), torch.randn(len(sizes), 19, 40)
    out = grouped_linear(x, weights, offsets)
    torch.testing.assert_close(
        out.double(), grouped_linear_reference(x, weights, offsets, torch.float64), rtol=0, atol=1e-5
    )
    for group, (start, stop) in enumerate(itertools.pairwise(offsets.tolist())):
        assert_same_bits(out[start:stop], linear(x[start:stop], weights[group]))


@pytest.mark.parametrize("offsets", [[0, 3, 5], [1, 3, 6], [0, 7, 6], [0, -1, 6]])
def test_bad_group_offsets(offsets: list[int]) -> None:
    with pytest.raises(ValueError, match="ascend"):
        grouped_linear(torch.randn(6, 8), torch.randn(2, 4, 8), torch.tensor(offsets, dtype=torch.int32))


def test_library_order_on_request() -> None:
    x, weight = torch.randn(9, 64).bfloat16(), torch.randn(20, 64)
    torch.testing.assert_close(
        linear(x, weight, batch_invariant=False), linear(x, weight), rtol=0.01, atol=1e-3
    )
    for out_dtype in (None, torch.float32):
        loose = linear(x, weight, out_dtype, batch_invariant=False, round_inputs=True)
        strict = linear(x, weight, out_dtype, round_inputs=True)
        assert loose.dtype == strict.dtype
        torch.testing.assert_close(loose, strict, rtol=0.01, atol=1e-3)
    grouped = x.view(9, 2, 32)
    loose = grouped_columns(grouped, weight.view(40, 32), batch_invariant=False)
    torch.testing.assert_close(loose, grouped_columns(grouped, weight.view(40, 32)), rtol=0.01, atol=1e-3)
    assert loose.is_contiguous()


def test_mistakes_are_refused() -> None:
    with pytest.raises(AssertionError, match="weight"):
        linear(torch.randn(2, 8), torch.randn(3, 9))
    with pytest.raises(AssertionError, match="groups of 32"):
        linear(torch.randn(2, 40), torch.randn(3, 40), round_inputs=True)
    with pytest.raises(AssertionError, match="dtype"):
        linear(torch.randn(2, 8).double(), torch.randn(3, 8))
    with pytest.raises(UnsupportedOpError, match="meta"):
        linear(torch.randn(2, 8, device="meta"), torch.randn(3, 8))
    with pytest.raises(ValueError, match="at least 1"):
        cpu.set_num_threads(0)


def test_calls_from_several_threads() -> None:
    x, weight = torch.randn(200, 64).bfloat16(), torch.randn(96, 64)
    expected, results = linear(x, weight), []

    def call() -> None:
        for _ in range(20):
            results.append(torch.equal(linear(x, weight), expected))

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True] * 80


def test_forked_process_has_its_own_threads(with_threads) -> None:
    with_threads(3)
    x, weight = torch.randn(200, 64), torch.randn(96, 64)
    expected = linear(x, weight)
    child = os.fork()
    if child == 0:  # no exception may leave this branch: it would run the rest of the tests twice
        os._exit(0 if torch.equal(linear(x, weight), expected) else 1)
    assert os.waitpid(child, 0)[1] == 0
