"""Edits of logits, acceptance of drafts, confidences: kernels against their references."""

from __future__ import annotations

import pytest
import torch

from tests.support.compare import assert_same_bits
from tests.support.kernel_runs import KernelRunner
from tilelang_ops.sampling import accept_drafts
from tilelang_ops.sampling.accept_drafts import cuda as accept_cuda
from tilelang_ops.sampling.add_to_logits import cuda as add_cuda
from tilelang_ops.sampling.add_to_logits import reference as add_reference
from tilelang_ops.sampling.apply_penalties import cuda as penalties_cuda
from tilelang_ops.sampling.apply_penalties import reference as penalties_reference
from tilelang_ops.sampling.apply_token_bitmask import cuda as bitmask_cuda
from tilelang_ops.sampling.apply_token_bitmask import reference as bitmask_reference
from tilelang_ops.sampling.confidence_head import cuda as confidence_cuda
from tilelang_ops.sampling.confidence_head import reference as confidence_reference
from tilelang_ops.sampling.keep_listed import cuda as listed_cuda
from tilelang_ops.sampling.keep_listed import reference as listed_reference

VOCAB = 1061  # neither whole words of bits nor whole groups


def strided_logits(num_rows: int) -> torch.Tensor:
    """[num_rows, VOCAB], rows apart."""
    return (3 * torch.randn(num_rows, VOCAB + 3))[:, :VOCAB]


def pairs(num_rows: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Distinct rows and tokens, both ends of the vocabulary among them."""
    flat = torch.randperm(num_rows * VOCAB)[:count]
    flat[:2] = torch.tensor([0, num_rows * VOCAB - 1])
    flat = flat.unique()
    return (flat // VOCAB).int(), (flat % VOCAB).int()


@pytest.mark.parametrize("num_masks", [1, 3])
def test_apply_token_bitmask(run_kernel: KernelRunner, num_masks: int) -> None:
    logits = strided_logits(5)
    bitmask = torch.randint(-(2**31), 2**31 - 1, (num_masks, (VOCAB + 31) // 32), dtype=torch.int32)
    bitmask[0, :3] = torch.tensor([0, -1, -(2**31)])
    rows = torch.randperm(5)[:num_masks].int()
    expected = logits.clone()
    bitmask_reference.run(expected, bitmask, rows)
    _, arguments = run_kernel(bitmask_cuda, logits, bitmask, rows)
    assert_same_bits(arguments[0], expected)


@pytest.mark.parametrize("count", [2, 300])
def test_apply_penalties(run_kernel: KernelRunner, count: int) -> None:
    logits = strided_logits(6)
    logits[0, :9] = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e-40, -1e-40, 1.0, -1.0])
    rows, tokens = pairs(6, count)
    counts = torch.randint(0, 4, rows.shape, dtype=torch.int32)
    factors = 0.5 + torch.rand(6), torch.randn(6), torch.randn(6)
    expected = logits.clone()
    penalties_reference.run(expected, rows, tokens, counts, *factors)
    _, arguments = run_kernel(penalties_cuda, logits, rows, tokens, counts, *factors)
    assert_same_bits(arguments[0], expected)


@pytest.mark.parametrize("has_values", [False, True])
def test_add_to_logits(run_kernel: KernelRunner, has_values: bool) -> None:
    logits = strided_logits(4)
    rows, tokens = pairs(4, 200)
    values = torch.randn(rows.shape) if has_values else None
    if values is None:
        rows, tokens = torch.cat([rows, rows]), torch.cat([tokens, tokens])  # pairs may repeat
    else:
        values[3] = -torch.inf
    expected = logits.clone()
    add_reference.run(expected, rows, tokens, values)
    _, arguments = run_kernel(add_cuda, logits, rows, tokens, values)
    assert_same_bits(arguments[0], expected)


def test_keep_listed(run_kernel: KernelRunner) -> None:
    logits = strided_logits(5)
    lists = [[VOCAB - 1, 0, 7, 7], [], list(range(0, VOCAB, 2))]
    rows = torch.tensor([0, 2, 4], dtype=torch.int32)
    offsets = torch.tensor([0, *torch.tensor([len(x) for x in lists]).cumsum(0)], dtype=torch.int32)
    tokens = torch.tensor([t for x in lists for t in x], dtype=torch.int32)
    expected = logits.clone()
    listed_reference.run(expected, rows, offsets, tokens)
    _, arguments = run_kernel(listed_cuda, logits, rows, offsets, tokens)
    assert_same_bits(arguments[0], expected)


@pytest.mark.parametrize("num_seqs", [1, 3, 130])
def test_accept_drafts(run_kernel: KernelRunner, num_seqs: int) -> None:
    width = 6
    lengths = torch.randint(1, width + 1, (num_seqs,))
    offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
    num_rows = int(offsets[-1])
    tokens = torch.randint(0, 50, (num_rows,), dtype=torch.int32)
    drafts = torch.where(torch.rand(num_rows) < 0.7, tokens, torch.randint(0, 50, (num_rows,)).int())
    drafts[(offsets[1:] - 1).long()] = -1
    faults = (torch.rand(num_rows) < 0.1).to(torch.uint8)
    expected = accept_drafts(tokens, drafts, faults, offsets, width)
    outs = (torch.full_like(part, 77) for part in expected)
    _, arguments = run_kernel(accept_cuda, tokens, drafts, faults, offsets, *outs)
    actual = arguments[4:]
    for a, b in zip(actual, expected, strict=True):
        assert torch.equal(a, b)
    # One sequence after the other.
    for i in range(num_seqs):
        count = 0
        row = int(offsets[i])
        while drafts[row + count] == tokens[row + count] and faults[row + count] == 0:
            count += 1
        assert int(expected[1][i]) == count + 1 and int(expected[2][i]) == row + count
        assert expected[0][i, : count + 1].tolist() == tokens[row : row + count + 1].tolist()
        assert not expected[0][i, count + 1 :].any()


@pytest.mark.parametrize(
    ("dtype", "hidden_size", "rank"), [(torch.bfloat16, 264, 16), (torch.float32, 37, 5)]
)
def test_confidence_head(run_kernel: KernelRunner, dtype: torch.dtype, hidden_size: int, rank: int) -> None:
    temperatures, offsets = 0.5 + torch.rand(3), torch.randn(3)
    temperatures[1] = 1e-5  # saturates
    weight = torch.randn(hidden_size + rank).to(dtype)
    for n in (1, 6):
        hidden = torch.randn(3, n, hidden_size).to(dtype)
        markov_rows = torch.randn(3, n, rank).to(dtype)
        arguments = hidden, markov_rows, weight, temperatures, offsets, 60.0
        logits, confidences = run_kernel(confidence_cuda, *arguments)[0]
        expected = confidence_reference.run(*(a.double() if torch.is_tensor(a) else a for a in arguments))
        # Sums of hidden_size products in float32: errors grow with the square root of their number.
        torch.testing.assert_close(logits, expected[0].float(), rtol=1e-5, atol=1e-4)
        torch.testing.assert_close(
            confidences,
            torch.sigmoid((logits / temperatures + offsets).clamp(-60, 60)),
            rtol=1e-5,
            atol=1e-30,
        )
        wide, _ = run_kernel(confidence_cuda, hidden, markov_rows, weight.float(), *arguments[3:])
        assert_same_bits(wide[0], logits)
        last, _ = run_kernel(confidence_cuda, hidden[:, -1:], markov_rows[:, -1:], *arguments[2:])
        assert_same_bits(last[0], logits[-1:])
        assert_same_bits(last[1], confidences[-1:])
