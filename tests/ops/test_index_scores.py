"""Index scores: key formats, against float64, the paged layout, summation order, rows that ignore others."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from deepinfer.ops import index_scores as native
from deepinfer.ops.quant import encode_mxfp4
from tests.support.compare import assert_same_bits
from tilelang_ops.common.dispatch import UnsupportedOpError
from tilelang_ops.indexer import candidate_scores
from tilelang_ops.indexer.candidate_scores import reference as candidates_reference
from tilelang_ops.indexer.index_scores import reference
from tilelang_ops.kv_index import select_entries


def index_scores(*args: Tensor | None) -> Tensor:
    """The native kernel with the columns that the rows see, unless the last argument says how many."""
    num_visible = args[6]
    width = args[7:] or (int(num_visible.max()) if num_visible.numel() else 0,)
    return native.index_scores(*args[:7], *width)


def key_pools(blocks: int, entries: int) -> tuple[Tensor, Tensor]:
    """Codes [blocks, entries, 64] and scales [blocks, entries, 4] in one section, 0xFF around it."""
    codes, scales = encode_mxfp4(torch.randn(blocks, entries, 128))
    stride = 96 + entries * 68 + 32
    memory = torch.full((blocks, stride), 0xFF, dtype=torch.uint8)
    memory[:, 96 : 96 + entries * 64] = codes.flatten(1)
    memory[:, 96 + entries * 64 : 96 + entries * 68] = scales.flatten(1)
    code_view = memory[:, 96 : 96 + entries * 64].unflatten(1, (entries, 64))
    return code_view, memory[:, 96 + entries * 64 : 96 + entries * 68].unflatten(1, (entries, 4))


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def single_scores(codes: Tensor, scales: Tensor, q: Tensor) -> Tensor:
    """[n]: one head of weight 1 against n keys in one block."""
    n = codes.shape[0]
    return index_scores(
        q.view(1, 1, 128), torch.ones(1, 1), codes[None], scales[None], int32(0)[None], int32(0), int32(n)
    )[0]


def test_keys_of_every_code_and_scale(instruction_set: str) -> None:
    """Unit queries pick single channels; relu is undone by a second query of the opposite sign."""
    values = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    values = torch.cat([values, -values]).double()
    codes = torch.arange(256, dtype=torch.uint8).view(4, 64)  # every byte once, in four keys
    scales = torch.tensor([[0, 1, 60, 126], [127, 128, 200, 250], [100, 101, 130, 140], [0, 0, 250, 250]])
    factors = torch.ldexp(torch.ones(4, 4, dtype=torch.float64), scales - 127)
    nibbles = torch.stack([codes & 15, codes >> 4], dim=-1).flatten(1).long()
    expected = values[nibbles] * factors.repeat_interleave(32, dim=1)
    for channel in range(128):
        unit = torch.zeros(128)
        unit[channel] = 1.0
        got = single_scores(codes, scales.byte(), unit) - single_scores(codes, scales.byte(), -unit)
        assert torch.equal(got, expected[:, channel].float()), f"{channel=}"


def test_golden_keys(instruction_set: str, units) -> None:
    block = units.under("formats")
    codes, scales = block["index_key/codes"], block["index_key/scale_bytes"]
    for channel in range(128):
        unit = torch.zeros(128)
        unit[channel] = 1.0
        got = single_scores(codes, scales, unit) - single_scores(codes, scales, -unit)
        assert torch.equal(got, block["index_key/rounded"][:, channel].float()), f"{channel=}"


def test_nan_scale_is_nan(instruction_set: str) -> None:
    codes, scales = encode_mxfp4(torch.randn(20, 128))
    scales[7, 2] = 0xFF
    assert torch.isnan(single_scores(codes, scales, torch.ones(128))).nonzero().flatten().tolist() == [7]


@pytest.mark.parametrize("heads", [1, 2, 8, 9, 32])
@pytest.mark.parametrize("entries", [24, 64, 128])
def test_against_float64(instruction_set: str, heads: int, entries: int) -> None:
    codes, scales = key_pools(12, entries)
    tables = torch.stack([torch.randperm(12), torch.randperm(12), torch.randperm(12)]).int()[:, :5]
    visible = int32(0, 1, 15, 16, 17, entries - 1, entries, entries + 1, 5 * entries, 3 * entries + 5)
    row_seq = int32(0, 0, 1, 1, 1, 0, 2, 2, 2, 2)
    args = (
        torch.randn(10, heads, 128),
        torch.randn(10, heads),
        codes,
        scales,
        tables,
        row_seq,
        visible,
        5 * entries + 3,
    )
    out, expected = index_scores(*args), reference.run(*args, dtype=torch.float64)
    assert out.shape == (10, 5 * entries + 3) and out.dtype == torch.float32
    for row, count in enumerate(visible.tolist()):
        assert bool((out[row, count:] == float("-inf")).all())
        torch.testing.assert_close(out[row, :count].double(), expected[row, :count], rtol=1e-6, atol=1e-4)


def test_float32_keys(instruction_set: str) -> None:
    keys = torch.randn(6, 40, 300)[:, :20, 50 : 50 + 128]
    args = (torch.randn(3, 8, 128), torch.randn(3, 8), keys, None, int32(4, 1, 2, 5)[None], int32(0, 0, 0))
    visible = int32(80, 33, 7)
    out = index_scores(*args, visible)
    expected = reference.run(*args, visible, 80, dtype=torch.float64)
    torch.testing.assert_close(out.double(), expected, rtol=1e-6, atol=1e-4)


def test_bfloat16_queries_and_weights(instruction_set: str) -> None:
    q, weights, (codes, scales) = (
        torch.randn(5, 8, 128).bfloat16(),
        torch.randn(5, 8).bfloat16(),
        key_pools(3, 64),
    )
    rest = codes, scales, int32(2, 0)[None], int32(0, 0, 0, 0, 0), int32(100, 3, 70, 128, 1)
    assert_same_bits(index_scores(q, weights, *rest), index_scores(q.float(), weights.float(), *rest))


def test_order_of_summation(instruction_set: str) -> None:
    """Channels in order, then heads: a large value swallows a small one before its opposite comes."""
    big = 2.0**30
    codes, scales = encode_mxfp4(torch.ones(1, 128))

    def score(*channels: float) -> float:
        q = torch.zeros(128)
        q[: len(channels)] = torch.tensor(channels)
        return float(single_scores(codes, scales, q))

    assert (score(big, 1.0, -big), score(big, -big, 1.0), score(1.0, big, -big)) == (0.0, 1.0, 0.0)
    q = torch.ones(1, 3, 128) / 128
    rest = codes[None], scales[None], int32(0)[None], int32(0), int32(1)
    for weights, expected in (([big, 1.0, -big], 0.0), ([big, -big, 1.0], 1.0)):
        assert index_scores(q, torch.tensor([weights]), *rest).item() == expected


def test_relu_comes_before_the_weight(instruction_set: str) -> None:
    codes, scales = encode_mxfp4(torch.ones(1, 128))
    rest = codes[None], scales[None], int32(0)[None], int32(0), int32(1)
    q = torch.stack([torch.ones(128), -torch.ones(128)])[None] / 128
    assert index_scores(q, torch.tensor([[-3.0, -5.0]]), *rest).item() == -3.0


def test_rows_ignore_their_batch(with_threads) -> None:
    codes, scales = key_pools(20, 64)
    tables = torch.stack([torch.randperm(20) for _ in range(4)]).int()[:, :6]
    row_seq = torch.arange(4).repeat_interleave(17).int()
    q, weights = torch.randn(68, 8, 128), torch.randn(68, 8)
    visible = torch.randint(0, 6 * 64 + 1, (68,)).int()

    def scores(*rows: Tensor) -> Tensor:
        q, weights, row_seq, visible = rows
        return index_scores(q, weights, codes, scales, tables, row_seq, visible, 6 * 64)

    with_threads(1)
    rows = q, weights, row_seq, visible
    whole = scores(*rows)
    for num_threads, size in itertools.product((1, 2, 3, 4), (1, 2, 16, 19, 68)):
        with_threads(num_threads)
        parts = [scores(*part) for part in zip(*(tensor.split(size) for tensor in rows))]
        assert_same_bits(torch.cat(parts), whole, f"{num_threads=} {size=}")
    order = torch.randperm(68)
    assert_same_bits(scores(*(tensor[order] for tensor in rows)), whole[order], "rows of mixed sequences")


def test_scores_follow_the_block_table(instruction_set: str) -> None:
    """Keys moved to other blocks give the same scores through the new table."""
    codes, scales = key_pools(8, 64)
    q, weights = torch.randn(2, 8, 128), torch.randn(2, 8)
    rest = int32(0, 0), int32(190, 77)
    expected = index_scores(q, weights, codes, scales, int32(1, 2, 3)[None], *rest)
    place = torch.tensor([0, 6, 2, 4, 1, 3, 5, 7])  # block i moves to place[i]
    moved_codes, moved_scales = torch.empty_like(codes), torch.empty_like(scales)
    moved_codes[place], moved_scales[place] = codes.clone(), scales.clone()
    table = place[1:4].int()[None]
    assert_same_bits(index_scores(q, weights, moved_codes, moved_scales, table, *rest), expected)


def test_empty() -> None:
    codes, scales = key_pools(2, 64)
    none = torch.empty(0, dtype=torch.int32)
    rest = codes, scales, int32(0)[None]
    assert index_scores(torch.empty(0, 8, 128), torch.empty(0, 8), *rest, none, none).shape == (0, 0)
    assert index_scores(torch.empty(0, 8, 128), torch.empty(0, 8), *rest, none, none, 7).shape == (0, 7)
    out = index_scores(torch.randn(1, 8, 128), torch.randn(1, 8), *rest, int32(0), int32(0), 5)
    assert_same_bits(out, torch.full((1, 5), float("-inf")))


@pytest.mark.parametrize(
    ("table", "seq", "visible", "width"),
    [
        ((2, 0), 0, 65, 128),
        ((0, -1), 0, 65, 128),
        ((0, 1), 1, 3, 128),
        ((0, 1), -1, 3, 128),
        ((0, 1), 0, 129, 200),
    ],
)
def test_bounds_are_checked(table: tuple[int, int], seq: int, visible: int, width: int) -> None:
    codes, scales = key_pools(2, 64)
    with pytest.raises(IndexError):
        index_scores(
            torch.randn(1, 8, 128),
            torch.randn(1, 8),
            codes,
            scales,
            int32(*table)[None],
            int32(seq),
            int32(visible),
            width,
        )


def test_too_narrow_result_is_refused() -> None:
    codes, scales = key_pools(1, 64)
    args = torch.randn(1, 8, 128), torch.randn(1, 8), codes, scales, int32(0)[None], int32(0), int32(40)
    with pytest.raises(IndexError, match="more entries"):
        index_scores(*args, 39)
    with pytest.raises(UnsupportedOpError, match="meta"):
        index_scores(args[0].to("meta"), *args[1:])


@pytest.mark.parametrize("entries", [24, 64])
@pytest.mark.parametrize("is_float", [False, True])
def test_candidates_have_the_scores_of_all(instruction_set: str, entries: int, is_float: bool) -> None:
    """Bit by bit, for lists that are full, short or empty, and blocks that lie across the pool's blocks."""
    codes, scales = (torch.randn(12, entries, 128), None) if is_float else key_pools(12, entries)
    tables = torch.stack([torch.randperm(12), torch.randperm(12)]).int()[:, :5]
    visible = int32(5 * entries, 0, 17, 5 * entries - 3, 33)
    of_rows = torch.randn(5, 8, 128), torch.randn(5, 8), codes, scales, tables, int32(0, 0, 1, 1, 1), visible
    width = 5 * entries
    whole = index_scores(*of_rows, width)
    for size in (1, 5, 8, 16):
        num_blocks = -(-width // size)
        blocks = torch.arange(num_blocks).expand(5, -1).int()
        blocks = blocks[:, torch.randperm(num_blocks)[: num_blocks * 2 // 3].sort().values].contiguous()
        blocks[3, 2:] = -1
        entry = (blocks[:, :, None] * size + torch.arange(size)).flatten(1)
        is_inside = (blocks >= 0).repeat_interleave(size, dim=1) & (entry < width)
        expected = torch.where(is_inside, whole.gather(1, entry.clamp(0, width - 1).long()), -torch.inf)
        scores = candidate_scores(*of_rows, blocks, size)
        assert_same_bits(scores, expected, f"blocks of {size}")
        seen = torch.isfinite(candidates_reference.run(*of_rows, blocks, size))
        assert torch.equal(torch.isfinite(scores), seen)
    assert candidate_scores(*of_rows, torch.empty(5, 0, dtype=torch.int32), 8).shape == (5, 0)


def test_candidates_choose_as_the_masked_scores_do() -> None:
    """Entries among the candidates are those of all scores with everything else hidden, ties included."""
    scores = (torch.randn(6, 200) * 2).round().relu()
    blocks = torch.stack([torch.randperm(25)[:9].sort().values for _ in range(6)]).int()
    blocks[2, 4:] = -1
    hidden = torch.ones(6, 25, dtype=torch.bool)
    for row, chosen in enumerate(blocks):
        hidden[row, chosen[chosen >= 0].long()] = False
    masked = scores.masked_fill(hidden.repeat_interleave(8, dim=1), -torch.inf)
    entry = (blocks.clamp(min=0)[:, :, None] * 8 + torch.arange(8)).flatten(1).long()
    own = scores.gather(1, entry).masked_fill((blocks < 0).repeat_interleave(8, dim=1), -torch.inf)
    for k in (3, 16, 64, 80):
        assert torch.equal(select_entries(own, k, blocks, 8), select_entries(masked, k))
