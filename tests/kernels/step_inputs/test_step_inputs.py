"""The kernels that make the inputs of decode steps against their references."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.support.compare import assert_same_bits
from tests.support.kernel_runs import KernelRunner
from tilelang_ops.step_inputs.correct_rows import cuda as correct_rows_cuda
from tilelang_ops.step_inputs.correct_rows import reference as correct_rows_reference
from tilelang_ops.step_inputs.deal_rows import cuda as deal_rows_cuda
from tilelang_ops.step_inputs.deal_rows import reference as deal_rows_reference
from tilelang_ops.step_inputs.draft_inputs import cuda as draft_inputs_cuda
from tilelang_ops.step_inputs.draft_inputs import reference as draft_inputs_reference
from tilelang_ops.step_inputs.draft_rows import cuda as draft_rows_cuda
from tilelang_ops.step_inputs.draft_rows import reference as draft_rows_reference
from tilelang_ops.step_inputs.pad_inputs import cuda as pad_inputs_cuda
from tilelang_ops.step_inputs.pad_inputs import reference as pad_inputs_reference

VOCAB = 60


def int32(*shape: int, low: int = 0, high: int = VOCAB) -> Tensor:
    return torch.randint(low, high, shape, dtype=torch.int32)


def assert_results(actual: tuple[Tensor, ...], expected: tuple[Tensor, ...], what: str) -> None:
    for place, (a, b) in enumerate(zip(actual, expected, strict=True)):
        assert_same_bits(a, b, f"{what}, result {place}")


@pytest.mark.parametrize(("num_drafts", "width"), [(5, 4), (0, 4), (2, 1), (3, 0)])
def test_correct_rows(run_kernel: KernelRunner, num_drafts: int, width: int) -> None:
    for num_seqs in (1, 70):
        seqlens_q = torch.randint(1, num_drafts + 2, (num_seqs,))
        num_rows = int(seqlens_q.sum())
        lens = int32(num_seqs, low=20, high=90)
        num_before = num_seqs + 3
        has_windows = width > 0
        args = (
            int32(num_rows),
            int32(num_rows),
            torch.repeat_interleave(torch.arange(num_seqs), seqlens_q).int(),
            int32(num_rows, width),
            torch.nn.functional.pad(seqlens_q.cumsum(0), (1, 0)).int(),
            lens,
            lens + 3,
            torch.randperm(num_before)[:num_seqs].int().masked_fill(torch.rand(num_seqs) < 0.3, -1),
            int32(num_seqs, low=1, high=9),
            int32(num_seqs, max(0, width - 1)),
            int32(num_before, num_drafts + 1),
            int32(num_before, low=1, high=num_drafts + 2),
            int32(num_before, num_drafts) if num_drafts else None,
            int32(VOCAB, high=1000) if has_windows else None,
            torch.rand(VOCAB) < 0.1 if has_windows else None,
            7,
        )
        expected = correct_rows_reference.run(*args)
        assert_results(run_kernel(correct_rows_cuda, *args)[0], expected, f"{num_seqs=}")
        _, after = run_kernel(correct_rows_cuda, *args, in_place=True)
        written = (after[place] for place in (0, 1, 5, 6, 3))
        assert_results(tuple(written), expected, f"{num_seqs=} in place")
        copies = [arg.clone() if torch.is_tensor(arg) else arg for arg in args]
        assert_results(correct_rows_reference.run(*copies, in_place=True), expected, "reference in place")
        assert_same_bits(copies[1], expected[1], "reference in place")


@pytest.mark.parametrize("width", [4, 0])
def test_deal_rows(run_kernel: KernelRunner, width: int) -> None:
    for num_seqs in (1, 3, 129, 300):
        planned, dealt = (torch.randint(1, 7, (num_seqs,)) for _ in range(2))
        dealt[-1] = 1
        if dealt.sum() >= planned.sum():
            planned[0] += dealt.sum() - planned.sum()
        dealt[-1] += planned.sum() - dealt.sum()
        num_rows = int(planned.sum())
        cu_seqlens_q = torch.nn.functional.pad(planned.cumsum(0), (1, 0)).int()
        args = dealt.int(), cu_seqlens_q, int32(num_seqs, low=20), int32(num_rows), int32(num_rows, width)
        actual = run_kernel(deal_rows_cuda, *args)[0]
        assert_results(actual, deal_rows_reference.run(*args), f"{num_seqs=}")


def test_draft_inputs(run_kernel: KernelRunner) -> None:
    for n in (1, 6):
        positions = torch.tensor([0, 1, 127, 128, 134, 70000], dtype=torch.int32)[-n:]
        args = int32(n), positions, int32(n, low=1), 5, 128, 134, 59
        assert_results(run_kernel(draft_inputs_cuda, *args)[0], draft_inputs_reference.run(*args), f"{n=}")


def test_draft_rows(run_kernel: KernelRunner) -> None:
    for num_seqs, first in ((1, 0), (70, 0), (70, 67), (9, None)):
        num_rows, num_outputs, width = 3 * num_seqs + 2, 2 * num_seqs + 1, 4
        parameters = (
            torch.rand(num_outputs),
            int32(num_outputs),
            torch.rand(num_outputs),
            torch.rand(num_outputs),
            torch.randint(-(2**63), 2**63 - 1, (num_outputs,)),
            torch.randint(0, 2**40, (num_outputs,)),
        )
        args = (
            int32(num_seqs, width),
            int32(num_seqs, high=width + 1),
            int32(num_seqs, high=num_outputs + 3),  # those of padding lie behind the last row
            int32(num_rows),
            torch.randperm(num_rows)[:num_outputs].int(),
            int32(num_seqs),
            *parameters,
            3,
            torch.randperm(num_seqs)[:5].int() if first is None else None,
            first or 0,
        )
        expected = draft_rows_reference.run(*args)
        assert_results(run_kernel(draft_rows_cuda, *args)[0], expected, f"{num_seqs=} {first=}")


def test_pad_inputs(run_kernel: KernelRunner) -> None:
    shapes = [((3, 1), (8, 1), 0), ((4, 5), (4, 70), -1), ((0, 3), (2, 3), 9), ((40, 70), (64, 100), 0)]
    table, word, place = [], 2, 5
    for (rows, width), (full_rows, full_width), value in shapes:
        table.append([word, rows, width, place, full_rows, full_width, value])
        word += rows * width
        place += full_rows * full_width + 1
    source, target = int32(word), int32(place, low=100, high=200)
    expected = target.clone()
    args = source, torch.tensor(table, dtype=torch.int32)
    pad_inputs_reference.run(*args, expected)
    assert_same_bits(run_kernel(pad_inputs_cuda, *args, target)[1][2], expected)
