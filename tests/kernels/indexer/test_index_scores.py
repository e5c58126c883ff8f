"""index_scores' kernel against float64, and a row alone against the row in a batch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.support.compare import assert_same_bits
from tests.support.kernel_runs import KernelRunner
from tilelang_ops.common.numerics import decode_mxfp4, encode_mxfp4
from tilelang_ops.indexer.candidate_scores import cuda as candidates_cuda
from tilelang_ops.indexer.candidate_scores import reference as candidates_reference
from tilelang_ops.indexer.index_scores import cuda, reference

ENTRIES = 16  # of a block
HEADS = 32


def batch(row_seq: list[int], visible: list[int]) -> tuple[Tensor, ...]:
    """Arguments of `run` in front of the width: three sequences over scattered blocks of a strided pool."""
    blocks = 40
    rounded = decode_mxfp4(*encode_mxfp4(torch.randn(len(row_seq), HEADS, 128)))
    pool = torch.zeros(blocks, ENTRIES * 68, dtype=torch.uint8)
    codes = pool[:, : ENTRIES * 64].unflatten(1, (ENTRIES, 64))
    scales = pool[:, ENTRIES * 64 :].unflatten(1, (ENTRIES, 4))
    packed, scale_bytes = encode_mxfp4(torch.randn(blocks, ENTRIES, 128) * torch.rand(blocks, ENTRIES, 1) * 8)
    codes.copy_(packed)
    scales.copy_(scale_bytes)
    tables = torch.randperm(blocks - 1)[: 3 * 12].view(3, 12).int() + 1
    weights = torch.randn(len(row_seq), HEADS).bfloat16()
    return (
        rounded.bfloat16(),
        weights,
        codes,
        scales,
        tables,
        torch.tensor(row_seq).int(),
        torch.tensor(visible).int(),
    )


@pytest.mark.parametrize(
    ("row_seq", "visible"),
    [
        ([0], [1]),
        ([0, 0, 0, 0, 1, 1, 2, 2, 2], [125, 126, 127, 128, 3, 4, 190, 191, 192]),
        ([2, 1, 1, 0, 0], [0, 130, 131, 129, 17]),
        ([0] * 6 + [2] * 5 + [1] * 6, [*range(60, 66), *range(128, 133), *range(1, 7)]),
    ],
)
def test_index_scores(run_kernel: KernelRunner, row_seq: list[int], visible: list[int]) -> None:
    arguments, width = batch(row_seq, visible), max(visible) + 2
    actual, _ = run_kernel(cuda, *arguments, width)
    expected = reference.run(*arguments, width, dtype=torch.float64)
    # Products of the rounded values are exact in float32; their sums are not.
    seen = torch.isfinite(expected)
    assert torch.equal(torch.isfinite(actual), seen)
    q, weights = arguments[:2]
    bound = (
        (weights.double().abs() * q.double().square().sum(-1).sqrt()).sum(-1, keepdim=True) * 60 * 2.0**-20
    )
    assert ((actual.double() - expected).abs() <= bound)[seen].all()
    for row in (0, len(row_seq) - 1):
        alone = [a[row : row + 1] if i in (0, 1, 5, 6) else a for i, a in enumerate(arguments)]
        one, _ = run_kernel(cuda, *alone, width)
        assert_same_bits(one[0], actual[row], f"row {row} alone")


def test_candidate_scores(run_kernel: KernelRunner) -> None:
    """Bit by bit the scores of all entries, gathered; full, short and empty lists, some past the end."""
    visible = [190, 191, 192, 3, 0, 70]
    arguments = batch([0, 0, 1, 1, 2, 2], visible)
    whole, _ = run_kernel(cuda, *arguments, 192)
    blocks = torch.stack([torch.randperm(24)[:20].sort().values for _ in visible]).int()
    blocks[1, 7:] = -1
    blocks[2, 0:] = torch.arange(4, 24)
    blocks[3, 1:] = blocks[4] = -1
    blocks[3, 0] = 0
    scores, _ = run_kernel(candidates_cuda, *arguments, blocks, 8)
    entries = (blocks[:, :, None] * 8 + torch.arange(8)).flatten(1)
    is_inside = (entries >= 0) & (blocks >= 0).repeat_interleave(8, dim=1)
    expected = torch.where(is_inside, whole.gather(1, entries.clamp(min=0).long()), -torch.inf)
    assert_same_bits(scores, expected)
    seen = torch.isfinite(candidates_reference.run(*arguments, blocks, 8))
    assert torch.equal(torch.isfinite(scores), seen)
    wide = [a.float() if a is arguments[1] else a for a in arguments]
    assert_same_bits(run_kernel(candidates_cuda, *wide, blocks, 8)[0], scores, "float32 weights")


def test_sums_with_no_entry_do_not_overflow() -> None:
    """TVM makes `last + unit <= least` of `last <= least - unit`; the emulator prints what was before."""
    assert 1 << 24 < cuda.NOWHERE < (1 << 31) - max(cuda.PART_KEYS.values())
