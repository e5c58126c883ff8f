"""Reading records back: what was stored, at the place it was stored to."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from deepinfer.ops.quant import round_fp4, round_fp8, round_mxfp4
from tests.ops.kv_cache.pools import make_pool
from tests.support.compare import assert_same_bits
from tilelang_ops.kv_cache import (
    copy_rows,
    load_index_keys,
    load_records,
    load_state_to_cache,
    select_state_slice,
    store_index_keys,
    store_main,
    store_window,
)

KINDS = {"window": (store_window, round_fp8, 528), "main": (store_main, round_fp4, 288)}


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_records_read_as_rounded(name: str, dtype: torch.dtype) -> None:
    """bfloat16 loses nothing."""
    store, rounded, num_bytes = KINDS[name]
    _, pool = make_pool(3, 4, num_bytes, torch.uint8, gap=2, offset=64)
    values = torch.randn(12, 512)
    places = torch.randperm(12)
    store(values, pool, places)
    loaded = load_records(pool, torch.cat([places, torch.tensor([-1])]), 512, dtype)
    assert loaded.dtype == dtype
    assert_same_bits(loaded[:12].float(), rounded(values))
    assert_same_bits(loaded[12].float(), torch.zeros(512))


def test_index_keys_read_as_rounded() -> None:
    _, codes = make_pool(3, 4, 64, torch.uint8, gap=2, offset=0)
    _, scales = make_pool(3, 4, 4, torch.uint8, gap=60, offset=32)
    keys, places = torch.randn(12, 128), torch.randperm(12)
    store_index_keys(keys, codes, scales, places)
    assert_same_bits(load_index_keys(codes, scales, places).float(), round_mxfp4(keys))
    assert_same_bits(load_index_keys(codes, scales, torch.tensor([-1]))[0].float(), torch.zeros(128))


def test_float_records_read_as_they_are() -> None:
    _, pool = make_pool(3, 4, 512, torch.float32, gap=2, offset=0)
    loaded = load_records(pool, torch.tensor([9, 2]), 512, torch.float32)
    assert_same_bits(loaded, torch.stack([pool[2, 1], pool[0, 2]]))
    assert load_records(pool, torch.empty(0, dtype=torch.int64), 512).shape == (0, 512)


@pytest.mark.parametrize("end", [0, 3, 8, 40, 43])
def test_a_slice_goes_from_one_ring_size_to_another(end: int) -> None:
    """Rings written position by position, read and written by slice, hold what direct writing gives."""
    long, short = torch.zeros(2, 15, 6, dtype=torch.uint8), torch.zeros(2, 9, 6, dtype=torch.uint8)
    expected = short.clone()
    for position in range(end):
        record = torch.randint(0, 256, (2, 6), dtype=torch.uint8)
        long[:, position % 15] = record
        if position >= end - 8:
            expected[:, position % 9] = record
    state = select_state_slice(long, end, 8)
    assert not state[:, : max(0, 8 - end)].any()
    load_state_to_cache(state, short, end)
    assert_same_bits(short, expected)


def test_rows_are_read_before_any_is_written() -> None:
    pool = torch.arange(4, dtype=torch.uint8)[:, None].repeat(1, 16)
    copy_rows(pool, torch.tensor([[0, 1], [1, 2], [2, 0]], dtype=torch.int32))
    assert pool[:, 0].tolist() == [2, 0, 1, 3]
    copy_rows(pool, torch.empty(0, 2, dtype=torch.int32))


def test_shapes_are_checked() -> None:
    ring = torch.zeros(2, 9, 6, dtype=torch.uint8)
    calls: list[Callable[[], Tensor | None]] = [
        lambda: load_records(torch.zeros(1, 1, 529, dtype=torch.uint8), torch.tensor([0]), 512),
        lambda: select_state_slice(ring, 3, 10),
        lambda: load_state_to_cache(torch.zeros(3, 8, 6, dtype=torch.uint8), ring, 3),
    ]
    for call in calls:
        with pytest.raises(AssertionError, match="shape"):
            call()
