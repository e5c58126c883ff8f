"""Storing records: bytes of the formats at the right places, nothing else touched."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from deepinfer.ops.quant import encode_fp4, encode_fp8, encode_mxfp4
from tests.ops.kv_cache.pools import make_pool
from tests.support.compare import assert_same_bits, check_against_cpu
from tilelang_ops.kv_cache import store_index_keys, store_main, store_window

STORES = {"window": (store_window, encode_fp8, 528), "main": (store_main, encode_fp4, 288)}


@pytest.mark.parametrize("name", STORES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("index", [[], [-1], [0], [11], [4, -1, 0, 11, -1, 3], list(range(12))])
@pytest.mark.parametrize("gap", [0, 3])
def test_release_records(device: str, name: str, dtype: torch.dtype, index: list[int], gap: int) -> None:
    store, encode, num_bytes = STORES[name]
    buffer, pool = make_pool(3, 4, num_bytes, torch.uint8, gap, offset=64)
    expected, expected_pool = buffer.clone(), None
    expected_pool = expected.as_strided(pool.shape, pool.stride(), 64)
    values = torch.randn(len(index), 512).to(dtype)
    for row, record in enumerate(index):
        if record >= 0:
            expected_pool[record // 4, record % 4] = torch.cat(encode(values[row]))
    before = pool.clone()
    store(values, pool, torch.tensor(index, dtype=torch.int64))
    assert_same_bits(buffer, expected)
    check_against_cpu(
        _returning(store), values, before, torch.tensor(index, dtype=torch.int64), device=device, bitwise=True
    )


@pytest.mark.parametrize("name", STORES)
def test_float_records(name: str) -> None:
    buffer, pool = make_pool(2, 5, 512, torch.float32, 1, offset=8)
    expected = buffer.clone()
    values = torch.randn(3, 512)
    expected_pool = expected.as_strided(pool.shape, pool.stride(), 8)
    expected_pool[1, 4], expected_pool[0, 2] = values[0], values[2]
    STORES[name][0](values, pool, torch.tensor([9, -1, 2]))
    assert_same_bits(buffer, expected)


@pytest.mark.parametrize("name", STORES)
def test_widths_are_checked(name: str) -> None:
    with pytest.raises(AssertionError, match="shape"):
        STORES[name][0](torch.zeros(1, 512), torch.zeros(1, 1, 529, dtype=torch.uint8), torch.tensor([0]))
    with pytest.raises(AssertionError, match="shape"):
        STORES[name][0](torch.zeros(2, 512), torch.zeros(1, 1, 528, dtype=torch.uint8), torch.tensor([0]))


@pytest.mark.parametrize("index", [[], [7], [3, -1, 0, 7]])
def test_index_keys_are_split(index: list[int]) -> None:
    """Codes and scales go to sections of their own, as in a block."""
    code_buffer, codes = make_pool(2, 4, 64, torch.uint8, 5, offset=0)
    scale_buffer, scales = make_pool(2, 4, 4, torch.uint8, 140, offset=32)
    expected = code_buffer.clone(), scale_buffer.clone()
    expected_codes = expected[0].as_strided(codes.shape, codes.stride(), 0)
    expected_scales = expected[1].as_strided(scales.shape, scales.stride(), 32)
    keys = torch.randn(len(index), 128)
    for row, record in enumerate(index):
        if record >= 0:
            place = record // 4, record % 4
            expected_codes[place], expected_scales[place] = encode_mxfp4(keys[row])
    store_index_keys(keys, codes, scales, torch.tensor(index, dtype=torch.int64))
    assert_same_bits(code_buffer, expected[0])
    assert_same_bits(scale_buffer, expected[1])


def test_float_index_keys() -> None:
    buffer, codes = make_pool(2, 4, 128, torch.float32, 2, offset=0)
    expected = buffer.clone()
    keys = torch.randn(2, 128)
    expected.as_strided(codes.shape, codes.stride(), 0)[1, 2] = keys[1]
    store_index_keys(keys, codes, None, torch.tensor([-1, 6]))
    assert_same_bits(buffer, expected)


def _returning(store: Callable[..., None]) -> Callable[..., Tensor]:
    """The store as a function that returns the pool."""

    def run(values: Tensor, pool: Tensor, index: Tensor) -> Tensor:
        store(values, pool, index)
        return pool

    return run
