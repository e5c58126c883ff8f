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
OF_HEADS = 2 * 17 * 2.0**-22  # error of sums of 32 float16 products: two instructions of 17 addends


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


@pytest.fixture
def run_fp8(run_kernel: KernelRunner) -> KernelRunner:
    """Where there are products in FP8."""
    if run_kernel.place == "sm_100a":
        pytest.skip("products in FP8 are for SM90")
    return run_kernel


def exponents(x: Tensor, spread: int) -> Tensor:
    """Random powers of two for each group of the last dimension, 2^-spread to 2^spread."""
    powers = torch.randint(-spread, spread + 1, (*x.shape[:-1], x.shape[-1] // 32))
    return torch.exp2(powers.float()).repeat_interleave(32, dim=-1)


@pytest.mark.parametrize("spread", [0, 3, 7])
@pytest.mark.parametrize(
    ("row_seq", "visible"),
    [
        ([0, 0, 0, 0, 1, 1, 2, 2, 2], [125, 126, 127, 128, 3, 4, 190, 191, 192]),
        ([2, 1, 0], [0, 130, 17]),
        ([0] * 6 + [2] * 5 + [1] * 6, [*range(60, 66), *range(128, 133), *range(1, 7)]),
    ],
)
def test_in_fp8(run_fp8: KernelRunner, row_seq: list[int], visible: list[int], spread: int) -> None:
    """Tensor cores keep 2^-13 of an instruction's largest addend, and round its sum to float16."""
    q, weights, codes, scales, *rest = batch(row_seq, visible)
    q = decode_mxfp4(*encode_mxfp4(q * exponents(q, spread))).bfloat16()
    keys = torch.randn(*codes.shape[:2], 128)
    packed, scale_bytes = encode_mxfp4(keys * exponents(keys, spread))
    scale_bytes[3, 5], packed[7, :, :16] = 255, 0
    codes.copy_(packed)
    scales.copy_(scale_bytes)
    arguments, width = (q, weights, codes, scales, *rest), max(visible) + 2
    actual, _ = run_fp8(cuda, *arguments, width, in_fp8=True)
    expected = reference.run(*arguments, width, dtype=torch.float64)
    assert torch.equal(actual == -torch.inf, expected == -torch.inf)
    assert torch.equal(actual.isnan(), expected.isnan())
    sizes = reference.run(q.abs(), weights.abs(), codes & 0x77, scales, *rest, width, dtype=torch.float64)
    # Four instructions of 33 addends, of each of which 2^-13 of the largest is kept, with a sum in float16.
    bound = sizes * (4 * (33 * 2.0**-13 + 2.0**-10) + OF_HEADS)
    seen = expected.isfinite()
    assert ((actual.double() - expected).abs() <= bound)[seen].all()
    for row in (0, len(row_seq) - 1):
        alone = [a[row : row + 1] if i in (0, 1, 5, 6) else a for i, a in enumerate(arguments)]
        one, _ = run_fp8(cuda, *alone, width, in_fp8=True)
        assert_same_bits(one[0], actual[row], f"row {row} alone")


def test_in_fp8_with_few_heads(run_fp8: KernelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight heads: 19 rows of a sequence and one of another, at most eight of which a block takes."""
    monkeypatch.setitem(globals(), "HEADS", 8)
    arguments = batch([0] * 19 + [1], [70] * 20)
    actual, _ = run_fp8(cuda, *arguments, 72, in_fp8=True)
    expected = reference.run(*arguments, 72, dtype=torch.float64)
    assert torch.equal(actual == -torch.inf, expected == -torch.inf)
    q, weights, codes, *rest = arguments
    sizes = reference.run(q.abs(), weights.abs(), codes & 0x77, *rest, 72, dtype=torch.float64)
    seen = expected.isfinite()
    bound = sizes * (4 * (33 * 2.0**-13 + 2.0**-10) + OF_HEADS)
    assert ((actual.double() - expected).abs() <= bound)[seen].all()
    one, _ = run_fp8(
        cuda, *(a[7:8] if i in (0, 1, 5, 6) else a for i, a in enumerate(arguments)), 72, in_fp8=True
    )
    assert_same_bits(one[0], actual[7], "a row alone")


def test_in_fp8_of_every_code(run_fp8: KernelRunner) -> None:
    """Queries of one channel: products are values of keys, exact with groups down to 2^-14 of the largest."""
    q, _, codes, scales, tables, _, _ = batch([0] * 8, [192] * 8)
    codes.copy_(torch.randint(0, 256, codes.shape, dtype=torch.uint8))
    scales.copy_(torch.randint(0, 8, scales.shape, dtype=torch.uint8) * 2 + 113)
    q.zero_()
    head = torch.arange(HEADS)
    for row in range(8):
        q[row, head, 4 * head + row % 4] = 3.0 if row < 4 else -0.25
    weights = 1.0 + torch.arange(8 * HEADS).view(8, HEADS) / 32
    rest = tables, torch.zeros(8).int(), torch.full((8,), 192).int()
    arguments = q, weights, codes, scales, *rest
    actual, _ = run_fp8(cuda, *arguments, 192, in_fp8=True)
    expected = reference.run(*arguments, 192, dtype=torch.float64)
    assert ((actual.double() - expected).abs() <= expected.abs() * OF_HEADS).all()


def test_rows_with_nan_do_not_touch_others(run_fp8: KernelRunner) -> None:
    arguments = batch([0, 0, 0, 0], [70, 70, 70, 70])
    clean, _ = run_fp8(cuda, *arguments, 70, in_fp8=True)
    arguments[0][1, 5, 77] = torch.nan
    arguments[1][2, 9] = torch.nan
    actual, _ = run_fp8(cuda, *arguments, 70, in_fp8=True)
    assert actual[1:3].isnan().all()
    assert_same_bits(actual[[0, 3]], clean[[0, 3]], "rows without NaN")


@pytest.mark.parametrize("in_fp8", [False, True], ids=["bfloat16", "fp8"])
def test_candidate_scores(run_kernel: KernelRunner, in_fp8: bool) -> None:
    """Bit by bit the scores of all entries, gathered; full, short and empty lists, some past the end."""
    if in_fp8 and run_kernel.place == "sm_100a":
        pytest.skip("the products in FP8 are for SM90")
    options = {"in_fp8": True} if in_fp8 else {}
    visible = [190, 191, 192, 3, 0, 70]
    arguments = batch([0, 0, 1, 1, 2, 2], visible)
    whole, _ = run_kernel(cuda, *arguments, 192, **options)
    blocks = torch.stack([torch.randperm(24)[:20].sort().values for _ in visible]).int()
    blocks[1, 7:] = -1
    blocks[2, 0:] = torch.arange(4, 24)
    blocks[3, 1:] = blocks[4] = -1
    blocks[3, 0] = 0
    scores, _ = run_kernel(candidates_cuda, *arguments, blocks, 8, **options)
    entries = (blocks[:, :, None] * 8 + torch.arange(8)).flatten(1)
    is_inside = (entries >= 0) & (blocks >= 0).repeat_interleave(8, dim=1)
    expected = torch.where(is_inside, whole.gather(1, entries.clamp(min=0).long()), -torch.inf)
    assert_same_bits(scores, expected)
    seen = torch.isfinite(candidates_reference.run(*arguments, blocks, 8))
    assert torch.equal(torch.isfinite(scores), seen)
    wide = [a.float() if a is arguments[1] else a for a in arguments]
    assert_same_bits(run_kernel(candidates_cuda, *wide, blocks, 8, **options)[0], scores, "float32 weights")


def test_sums_with_no_entry_do_not_overflow() -> None:
    """TVM makes `last + unit <= least` of `last <= least - unit`; the emulator prints what was before."""
    assert 1 << 24 < cuda.NOWHERE < (1 << 31) - max(cuda.PART_KEYS.values())
