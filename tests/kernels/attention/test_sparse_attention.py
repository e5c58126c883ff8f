"""sparse_attention's kernels against float64.

Unpacked keys are exact in bfloat16, as queries are, and sums are float32's. What rounds are the weights, to
bfloat16 for the second product, and the result, 2^-9 each: an output is off by less than 2^-9 of the largest
|value| that it sees, of normal ones about 4.5, and half a unit of its own last place.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.compare import assert_same_bits
from tests.support.kernel_runs import KernelRunner
from tilelang_ops.attention.sparse_attention import cuda
from tilelang_ops.attention.sparse_attention.reference import attend
from tilelang_ops.common.numerics import decode_fp4, decode_fp8, encode_fp4, encode_fp8

HEADS = 5
SCALE = 512**-0.5
NO_SINK = float("-inf")
TOLERANCE = {"rtol": 2.0**-8, "atol": 4.5 * 2.0**-9}


def window_pool(slots: int = 3, ring: int = 40) -> Tensor:
    """uint8 [slots, ring, 528] of quantised normal values, other bytes between the slots."""
    records = torch.cat(encode_fp8(torch.randn(slots, ring, 512)), dim=-1)
    memory = torch.full((slots, ring + 7, 528), 0xFF, dtype=torch.uint8)
    memory[:, :ring] = records
    return memory[:, :ring]


def main_pool(blocks: int = 4, entries: int = 64) -> Tensor:
    """uint8 [blocks, entries, 288] of quantised normal values, other bytes between the blocks."""
    records = torch.cat(encode_fp4(torch.randn(blocks, entries, 512)), dim=-1)
    memory = torch.full((blocks, entries + 6, 288), 0xFF, dtype=torch.uint8)
    memory[:, :entries] = records
    return memory[:, :entries]


def lists(rows: int, width: int, num_records: int) -> Tensor:
    """[rows, width] int32 indices with duplicates, about one in six of them -1."""
    index = torch.randint(0, num_records, (rows, width), dtype=torch.int32)
    return index.masked_fill(torch.rand(rows, width) < 1 / 6, -1)


def attention(run_kernel: KernelRunner, *args: Any) -> Tensor:
    return run_kernel.overhanging()(cuda, *args, SCALE)[0]


@pytest.mark.parametrize(
    ("rows", "window", "main"), [(3, 128, 0), (2, 133, 0), (3, 70, 130), (2, 65, 1), (1, 1, 64), (2, 0, 127)]
)
def test_against_float64(run_kernel: KernelRunner, rows: int, window: int, main: int) -> None:
    args = (
        2 * torch.randn(rows, HEADS, 512).bfloat16(),
        window_pool(),
        lists(rows, window, 3 * 40),
        main_pool() if main else None,
        lists(rows, main, 4 * 64) if main else None,
        torch.randn(HEADS),
    )
    out = attention(run_kernel, *args)
    torch.testing.assert_close(out.double(), attend(*args, SCALE, torch.float64), **TOLERANCE)


def test_more_heads_than_a_block_has(run_kernel: KernelRunner) -> None:
    args = torch.randn(1, 70, 512).bfloat16(), window_pool(), lists(1, 20, 120), None, None, torch.randn(70)
    out = attention(run_kernel, *args)
    torch.testing.assert_close(out.double(), attend(*args, SCALE, torch.float64), **TOLERANCE)


def test_longest_lists(run_kernel: KernelRunner) -> None:
    window, main = (torch.randint(0, records, (1, 512), dtype=torch.int32) for records in (120, 256))
    args = torch.randn(1, HEADS, 512).bfloat16(), window_pool(), window, main_pool(), main, torch.randn(HEADS)
    out = attention(run_kernel, *args)
    torch.testing.assert_close(out.double(), attend(*args, SCALE, torch.float64), **TOLERANCE)


def test_rows_depend_on_their_list_of_keys_alone(run_kernel: KernelRunner) -> None:
    """A row alone, in a batch, with missing keys elsewhere: the same bits. No keys, no result.

    More rows than blocks: a block passes from rows without keys, and with one tile or more, to any such.
    """
    rows = 9
    q, sink, pools = (
        torch.randn(rows, HEADS, 512).bfloat16(),
        torch.randn(HEADS),
        (window_pool(), main_pool()),
    )
    window, main = lists(rows, 80, 120), lists(rows, 100, 256)
    window[1::3], main[1], main[3:] = -1, -1, -1
    window[5:7], window[8], window[8, 3] = -1, -1, 17

    def attend_to(q: Tensor, window: Tensor, main: Tensor) -> Tensor:
        return attention(run_kernel, q, pools[0], window, pools[1], main, sink)

    whole = attend_to(q, window, main)
    expected = attend(q, pools[0], window, pools[1], main, sink, SCALE, torch.float64)
    torch.testing.assert_close(whole.double(), expected, **TOLERANCE)
    is_empty = ((window < 0).all(1) & (main < 0).all(1)).nonzero()[:, 0]
    assert is_empty.tolist() == [1, 4, 5, 6, 7]
    assert_same_bits(whole[is_empty], torch.zeros_like(whole[is_empty]))
    order = torch.tensor([2, 0, 8])
    assert_same_bits(attend_to(q[order], window[order], main[order]), whole[order], "other rows, other order")
    spread = torch.full((1, 300), -1, dtype=torch.int32)
    spread[0, 5:245:3] = window[2]
    packed = main[2][main[2] >= 0][None]
    assert_same_bits(attend_to(q[2:3], spread, packed), whole[2:3], "missing keys at other places")


def single_keys(run_kernel: KernelRunner, pool: Tensor, is_main: bool) -> Tensor:
    """[records, 512] what rows with one key each and without a sink yield: its weight is exactly 1."""
    rows = pool.shape[1]
    index, none = torch.arange(rows, dtype=torch.int32)[:, None], torch.empty(rows, 0, dtype=torch.int32)
    args = (window_pool(1, 1), none, pool, index) if is_main else (pool, index, None, None)
    return attention(
        run_kernel, torch.zeros(rows, HEADS, 512).bfloat16(), *args, torch.full((HEADS,), NO_SINK)
    )[:, 0]


def test_window_records_of_every_code_and_scale(run_kernel: KernelRunner) -> None:
    """Of every scale with which all codes are normal numbers in bfloat16."""
    numbers = [code for code in range(256) if code & 127 != 127]
    codes = torch.tensor([*numbers, *numbers, 0, 0, 0, 0], dtype=torch.uint8)
    scales = torch.arange(10, 250).clamp(max=246).view(15, 16).to(torch.uint8)
    pool = torch.cat([codes.expand(15, 512), scales], dim=1)[None]
    values = decode_fp8(pool[0, :, :512], pool[0, :, 512:])
    assert torch.equal(values.bfloat16().float(), values)
    assert_same_bits(single_keys(run_kernel, pool, False).float(), values + 0.0)


def test_main_records_of_every_code_and_scale(run_kernel: KernelRunner) -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    scales = torch.arange(256).view(8, 32)
    scales = torch.where(scales & 127 == 127, 0, scales)[:4].to(torch.uint8)  # scales are never negative
    pool = torch.cat([codes.expand(4, 256), scales], dim=1)[None]
    values = decode_fp4(pool[0, :, :256], pool[0, :, 256:])
    assert torch.equal(values.bfloat16().float(), values)
    assert_same_bits(single_keys(run_kernel, pool, True).float(), values + 0.0)


def test_nan_scales_are_nan(run_kernel: KernelRunner) -> None:
    pool = window_pool(1, 2).clone()
    pool[0, 0, 512 + 2] = 0xFF
    out = single_keys(run_kernel, pool, False)
    assert torch.isnan(out[0]).any() and torch.isfinite(out[1]).all()
    pool = main_pool(1, 2).clone()
    pool[0, 0, 256 + 31] = 0x7F
    out = single_keys(run_kernel, pool, True)
    assert torch.isnan(out[0]).any() and torch.isfinite(out[1]).all()


def test_sinks(run_kernel: KernelRunner) -> None:
    sink = torch.tensor([NO_SINK, -200.0, 0.0, 40.0, 500.0])
    args = 9 * torch.randn(2, HEADS, 512).bfloat16(), window_pool(), lists(2, 30, 120), None, None, sink
    out = attention(run_kernel, *args)
    torch.testing.assert_close(out.double(), attend(*args, SCALE, torch.float64), **TOLERANCE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_formats(run_kernel: KernelRunner, dtype: torch.dtype) -> None:
    """Float32 queries over records, bfloat16 ones over float32 pools: float32 sums, in a fixed order."""
    if dtype == torch.float32:
        window, main = window_pool(), main_pool()
    else:
        window, main = torch.randn(3, 50, 512)[:, :40], torch.randn(4, 64, 512)
    q, sink, window_index, main_index = (
        torch.randn(3, 2, 512),
        torch.randn(2),
        lists(3, 9, 120),
        lists(3, 12, 256),
    )
    window_index[1], main_index[1] = -1, -1
    args = q.to(dtype), window, window_index, main, main_index, sink
    out = attention(run_kernel, *args)
    tolerance = {"rtol": 0, "atol": 2e-6} if dtype == torch.float32 else {"rtol": 2.0**-8, "atol": 2e-6}
    torch.testing.assert_close(out.double(), attend(*args, SCALE, torch.float64), **tolerance)
    alone = attention(run_kernel, q[2:].to(dtype), window, window_index[2:], main, main_index[2:], sink)
    assert_same_bits(alone, out[2:])
