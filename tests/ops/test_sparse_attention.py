"""Sparse attention: record formats, against float64, the sink, dependence on the key list alone."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from deepinfer.ops.quant import encode_fp4, encode_fp8
from tests.support.compare import assert_same_bits
from tilelang_ops.attention import sparse_attention
from tilelang_ops.attention.sparse_attention.reference import attend
from tilelang_ops.common.dispatch import UnsupportedOpError

SCALE = 512**-0.5
NO_SINK = float("-inf")


def window_pool(slots: int, ring: int, stride: int | None = None) -> Tensor:
    """uint8 [slots, ring, 528] view of quantised normal values; `stride` bytes from slot to slot."""
    records = torch.cat(encode_fp8(torch.randn(slots, ring, 512)), dim=-1)
    memory = torch.full((slots, stride or ring * 528), 0xFF, dtype=torch.uint8)
    view = memory[:, 16 : 16 + ring * 528] if stride else memory
    view.copy_(records.flatten(1))
    return view.unflatten(1, (ring, 528))


def main_pool(blocks: int, entries: int, stride: int | None = None) -> Tensor:
    """uint8 [blocks, entries, 288] view of quantised normal values."""
    records = torch.cat(encode_fp4(torch.randn(blocks, entries, 512)), dim=-1)
    memory = torch.full((blocks, stride or entries * 288), 0xFF, dtype=torch.uint8)
    view = memory[:, 64 : 64 + entries * 288] if stride else memory
    view.copy_(records.flatten(1))
    return view.unflatten(1, (entries, 288))


def lists(rows: int, width: int, num_records: int) -> Tensor:
    """[rows, width] int32 indices, about one in six of them -1."""
    index = torch.randint(0, num_records, (rows, width), dtype=torch.int32)
    return index.masked_fill(torch.rand(rows, width) < 1 / 6, -1)


def single_key(pool: Tensor, index: int) -> Tensor:
    """[512]: the value of one record, read as the only key without a sink, whose weight is exactly 1."""
    q, sink = torch.zeros(1, 1, 512), torch.tensor([NO_SINK])
    is_window = pool.shape[2] == 528
    one, none = torch.tensor([[index]], dtype=torch.int32), torch.empty(1, 0, dtype=torch.int32)
    if is_window:
        return sparse_attention(q, pool, one, None, None, sink, SCALE)[0, 0]
    return sparse_attention(q, window_pool(1, 1), none, pool, one, sink, SCALE)[0, 0]


def e4m3(code: int) -> float:
    """The format's definition: 4 exponent bits with bias 7, 3 mantissa bits, subnormals, 127 is NaN."""
    exponent, mantissa = code >> 3 & 15, code & 7
    value = mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10)
    return (-1 if code & 128 else 1) * (float("nan") if code & 127 == 127 else value)


E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def test_window_records_of_every_code_and_scale(instruction_set: str) -> None:
    # Two records hold all codes that are numbers; their scales run over the bytes that keep values finite.
    numbers = [code for code in range(256) if code & 127 != 127]
    codes = torch.tensor([*numbers, *numbers, 0, 0, 0, 0], dtype=torch.uint8)
    assert codes.numel() == 512
    values = torch.tensor([e4m3(code) for code in codes.tolist()], dtype=torch.float64)
    for first in range(0, 246, 16):
        scales = torch.arange(first, first + 16).clamp(max=246)
        pool = torch.cat([codes, scales.to(torch.uint8)]).view(1, 1, 528)
        expected = values * torch.ldexp(torch.ones(16, dtype=torch.float64), scales - 127).repeat_interleave(
            32
        )
        assert torch.equal(single_key(pool, 0), expected.float())
    small = (
        torch.arange(512, dtype=torch.uint8) % 48
    )  # magnitudes up to 1/2 stay finite under the largest scales
    small[1::2] += 128
    values = torch.tensor([e4m3(code) for code in small.tolist()], dtype=torch.float64)
    scales = torch.arange(239, 255)
    pool = torch.cat([small, scales.to(torch.uint8)]).view(1, 1, 528)
    expected = values * torch.ldexp(torch.ones(16, dtype=torch.float64), scales - 127).repeat_interleave(32)
    assert torch.equal(single_key(pool, 0), expected.float())


def test_main_records_of_every_code_and_scale(instruction_set: str) -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    low, high = [[E2M1[n & 7] * (-1 if n & 8 else 1) for n in nibbles] for nibbles in (range(16), range(16))]
    values = torch.tensor([v for byte in range(256) for v in (low[byte & 15], high[byte >> 4])]).double()
    for first in range(0, 256, 32):
        scales = [code if code & 127 != 127 else 0 for code in range(first, first + 32)]
        pool = torch.cat([codes, torch.tensor(scales, dtype=torch.uint8)]).view(1, 1, 288)
        expected = values * torch.tensor([e4m3(s) for s in scales]).double().repeat_interleave(16)
        assert torch.equal(single_key(pool, 0), expected.float())


def test_golden_records(instruction_set: str, units) -> None:
    block = units.under("formats")
    for name in ("window_kv", "compressed_kv"):
        pool = torch.cat([block[f"{name}/codes"], block[f"{name}/scale_bytes"]], dim=1)[None]
        for record, expected in enumerate(block[f"{name}/rounded"]):
            assert torch.equal(single_key(pool, record), expected.float())


def test_nan_bytes_are_nan(instruction_set: str) -> None:
    pool = window_pool(1, 3)
    pool[0, 0, 5], pool[0, 1, 512 + 2] = 0x7F, 0xFF
    assert torch.isnan(single_key(pool, 0)).any() and torch.isnan(single_key(pool, 1))[64:96].all()
    assert torch.isfinite(single_key(pool, 2)).all()
    entries = main_pool(1, 2)
    entries[0, 0, 256 + 31] = 0x7F
    assert torch.isnan(single_key(entries, 0))[496:].all() and torch.isfinite(single_key(entries, 1)).all()


def test_golden_block(instruction_set: str, units) -> None:
    block = units.under("attention")
    keys = torch.arange(20, dtype=torch.int32).expand(3, 20)
    index = keys.masked_fill(~block["allowed"].bool(), -1)
    out = sparse_attention(block["q"], block["kv"][None], index, None, None, block["sink"], SCALE)
    torch.testing.assert_close(out, block["out"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("heads", [1, 3, 4, 5, 64])
@pytest.mark.parametrize(("rows", "window", "main"), [(1, 1, 0), (2, 63, 1), (5, 128, 64), (13, 70, 200)])
def test_against_float64(instruction_set: str, heads: int, rows: int, window: int, main: int) -> None:
    rings, entries = window_pool(3, 40, stride=528 * 47 + 48), main_pool(4, 64, stride=288 * 70)
    args = (
        2 * torch.randn(rows, heads, 512),
        rings,
        lists(rows, window, 3 * 40),
        entries if main else None,
        lists(rows, main, 4 * 64) if main else None,
        2 * torch.randn(heads),
        SCALE,
    )
    out, expected = sparse_attention(*args), attend(*args, dtype=torch.float64)
    assert out.shape == args[0].shape and out.dtype == torch.float32
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=3e-6)


@pytest.mark.parametrize("num_keys", [1, 15, 16, 63, 64, 65, 127, 128, 129, 700])
def test_numbers_of_keys_at_the_edges_of_segments(instruction_set: str, num_keys: int) -> None:
    pool, index = window_pool(1, 700), torch.randperm(700, dtype=torch.int32)[None, :num_keys]
    args = torch.randn(1, 2, 512), pool, index, None, None, torch.randn(2), SCALE
    expected = attend(*args, dtype=torch.float64)
    torch.testing.assert_close(sparse_attention(*args).double(), expected, rtol=0, atol=2e-6)


def test_float32_records(instruction_set: str) -> None:
    rings, entries = torch.randn(2, 50, 700)[:, :40, 9 : 9 + 512], torch.randn(3, 8, 512)
    args = (torch.randn(6, 4, 512), rings, lists(6, 90, 80), entries, lists(6, 30, 24), torch.randn(4), SCALE)
    expected = attend(*args, dtype=torch.float64)
    torch.testing.assert_close(sparse_attention(*args).double(), expected, rtol=0, atol=3e-6)


def test_bfloat16_queries(instruction_set: str) -> None:
    q, *rest = torch.randn(9, 4, 512).bfloat16(), window_pool(2, 64), lists(9, 100, 128)
    rest = (*rest, main_pool(2, 64), lists(9, 64, 128), torch.randn(4), SCALE)
    out = sparse_attention(q, *rest)
    assert_same_bits(out, sparse_attention(q.float(), *rest).bfloat16())


@pytest.mark.parametrize("logit", [-300.0, -100.0, -30.0, -1.0, 0.0, 1e-3, 1.0, 5.0, 30.0, 300.0, 3000.0])
def test_weights_of_two_keys(instruction_set: str, logit: float) -> None:
    """The ratio of two weights is the exponential of the logits' difference, far beyond exp's range."""
    pool = torch.zeros(1, 2, 512)
    pool[0, 0, :2], pool[0, 1, 0], pool[0, 1, 2] = torch.tensor([0.0, 1.0]), 1.0, 1.0
    q = torch.zeros(1, 1, 512)
    q[0, 0, 0] = logit
    index = torch.tensor([[0, 1]], dtype=torch.int32)
    out = sparse_attention(q, pool, index, None, None, torch.tensor([NO_SINK]), 1.0)[0, 0]
    expected = torch.sigmoid(torch.tensor([-logit, logit], dtype=torch.float64))
    torch.testing.assert_close(out[1:3].double(), expected, rtol=3e-7, atol=1e-37)


@pytest.mark.parametrize("sink", [NO_SINK, -200.0, -3.0, 0.0, 2.0, 40.0, 500.0])
def test_sink_joins_the_denominator(instruction_set: str, sink: float) -> None:
    pool, q = torch.zeros(1, 1, 512), torch.zeros(1, 2, 512)
    pool[0, 0, 0], q[0, 1, 0] = 1.0, 1.5
    out = sparse_attention(
        q, pool, torch.zeros(1, 1, dtype=torch.int32), None, None, torch.full((2,), sink), 2.0
    )
    expected = torch.sigmoid(torch.tensor([0.0, 3.0], dtype=torch.float64) - sink)
    torch.testing.assert_close(out[0, :, 0].double(), expected, rtol=3e-7, atol=1e-37)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_without_keys_are_zero(instruction_set: str, dtype: torch.dtype) -> None:
    q, none = torch.randn(4, 4, 512).to(dtype), torch.full((4, 7), -1, dtype=torch.int32)
    pools = window_pool(1, 8), none, main_pool(1, 8)
    assert_same_bits(sparse_attention(q, *pools, none, torch.randn(4), SCALE), torch.zeros_like(q))
    empty = torch.empty(4, 0, dtype=torch.int32)
    out = sparse_attention(q, pools[0], empty, None, None, torch.full((4,), NO_SINK), SCALE)
    assert_same_bits(out, torch.zeros_like(q))
    some = none.clone()
    some[2, 3] = 5
    rows = sparse_attention(q, *pools, some, torch.randn(4), SCALE).flatten(1).any(1)
    assert rows.tolist() == [False, False, True, False]
    assert sparse_attention(q[:0], pools[0], none[:0], None, None, torch.zeros(4), SCALE).shape == (0, 4, 512)


def test_rows_ignore_their_batch(with_threads) -> None:
    rows, pools = 37, (window_pool(3, 134), main_pool(5, 64))
    q, sink = torch.randn(rows, 4, 512), torch.randn(4)
    window_index, main_index = lists(rows, 128, 3 * 134), lists(rows, 64, 5 * 64)

    def attend(q: Tensor, window: Tensor, main: Tensor) -> Tensor:
        return sparse_attention(q, pools[0], window, pools[1], main, sink, SCALE)

    with_threads(1)
    whole = attend(q, window_index, main_index)
    for num_threads, size in itertools.product((1, 2, 3, 4), (1, 2, 5, 12, 37)):
        with_threads(num_threads)
        parts = map(attend, q.split(size), window_index.split(size), main_index.split(size))
        assert_same_bits(torch.cat(list(parts)), whole, f"{num_threads=} {size=}")
    order = torch.randperm(rows)
    assert_same_bits(attend(q[order], window_index[order], main_index[order]), whole[order])
    heads = [
        sparse_attention(
            q[:, h : h + 1], pools[0], window_index, pools[1], main_index, sink[h : h + 1], SCALE
        )
        for h in range(4)
    ]
    assert_same_bits(torch.cat(heads, dim=1), whole, "a head alone")


def test_result_depends_on_the_list_of_keys_alone(instruction_set: str) -> None:
    """Neither the place of missing keys nor the place of records in the pools matters."""
    rings, entries, q, sink = window_pool(2, 100), main_pool(3, 64), torch.randn(1, 4, 512), torch.randn(4)
    window, main = torch.randperm(200)[:80].int(), torch.randperm(192)[:70].int()
    expected = sparse_attention(q, rings, window[None], entries, main[None], sink, SCALE)
    for spread, start in ((3, 0), (1, 0), (1, 37)):
        padded_window, padded_main = torch.full((240,), -1).int(), torch.full((210,), -1).int()
        padded_window[: 80 * spread : spread], padded_main[start : start + 70] = window, main
        out = sparse_attention(q, rings, padded_window[None], entries, padded_main[None], sink, SCALE)
        assert_same_bits(out, expected)
    moved, places = torch.full((4, 100, 528), 0xFF, dtype=torch.uint8), torch.randperm(400)[:80]
    moved[places // 100, places % 100] = rings[window.long() // 100, window.long() % 100]
    out = sparse_attention(q, moved, places.int()[None], entries, main[None], sink, SCALE)
    assert_same_bits(out, expected)


def test_mistakes_are_refused() -> None:
    q, pool, sink = torch.randn(1, 2, 512), window_pool(2, 4), torch.zeros(2)
    good, past = torch.zeros(1, 1, dtype=torch.int32), torch.full((1, 1), 8, dtype=torch.int32)
    with pytest.raises(IndexError, match="past its pool"):
        sparse_attention(q, pool, past, None, None, sink, SCALE)
    with pytest.raises(IndexError, match="past its pool"):
        sparse_attention(q, pool, good, main_pool(1, 8), past, sink, SCALE)
    with pytest.raises(AssertionError, match="shape"):
        sparse_attention(q, main_pool(1, 8), good, None, None, sink, SCALE)
    with pytest.raises(AssertionError, match="together"):
        sparse_attention(q, pool, good, main_pool(1, 8), None, sink, SCALE)
    with pytest.raises(UnsupportedOpError, match="meta"):
        sparse_attention(q.to("meta"), pool, good, None, None, sink, SCALE)
