"""The kernels that read records against their references; on a CPU also against what was stored."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.kv_cache.values import corner_vectors
from tests.ops.kv_cache.pools import make_pool
from tests.support.compare import assert_same_bits
from tests.support.kernel_runs import KernelRunner
from tilelang_ops.kv_cache import store_index_keys, store_main, store_window
from tilelang_ops.kv_cache.load_index_keys import cuda as load_index_keys_cuda
from tilelang_ops.kv_cache.load_index_keys import reference as load_index_keys_reference
from tilelang_ops.kv_cache.load_records import cuda as load_records_cuda
from tilelang_ops.kv_cache.load_records import reference as load_records_reference

STORES = {"window": (store_window, 528), "main": (store_main, 288)}


@pytest.mark.parametrize("name", STORES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_load_records(run_kernel: KernelRunner, name: str, dtype: torch.dtype) -> None:
    store, num_bytes = STORES[name]
    for num_rows, parts, gap in ((1, 1, 0), (40, 7, 3)):
        _, pool = make_pool(parts, 42 // parts, num_bytes, torch.uint8, gap, offset=64)
        store(corner_vectors(42, 512, torch.float32), pool, torch.randperm(42))
        index = torch.randint(-1, 42, (num_rows,))
        actual = run_kernel(load_records_cuda, pool, index, 512, dtype)[0]
        expected = load_records_reference.run(pool, index, 512, dtype)
        _assert_equal(actual, expected)


def test_load_every_code(run_kernel: KernelRunner) -> None:
    for num_bytes in (528, 288):
        pool = torch.arange(8 * num_bytes).mul(7).to(torch.uint8).view(2, 4, num_bytes)
        actual = run_kernel(load_records_cuda, pool, torch.arange(8), 512, torch.float32)[0]
        _assert_equal(actual, load_records_reference.run(pool, torch.arange(8), 512, torch.float32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_load_index_keys(run_kernel: KernelRunner, dtype: torch.dtype) -> None:
    _, codes = make_pool(7, 6, 64, torch.uint8, gap=5, offset=0)
    _, scales = make_pool(7, 6, 4, torch.uint8, gap=140, offset=32)
    store_index_keys(corner_vectors(42, 128, torch.float32), codes, scales, torch.randperm(42))
    for num_keys in (1, 50):
        index = torch.randint(-1, 42, (num_keys,))
        actual = run_kernel(load_index_keys_cuda, codes, scales, index, dtype)[0]
        _assert_equal(actual, load_index_keys_reference.run(codes, scales, index, dtype))


def test_load_floats(run_kernel: KernelRunner) -> None:
    _, pool = make_pool(3, 4, 512, torch.float32, gap=1, offset=8)
    index = torch.tensor([11, -1, 3, 3])
    for dtype in (torch.float32, torch.bfloat16):
        expected = load_records_reference.run(pool, index, 512, dtype)
        assert_same_bits(run_kernel(load_records_cuda, pool, index, 512, dtype)[0], expected)
        actual = run_kernel(load_index_keys_cuda, pool, None, index, dtype)[0]
        assert_same_bits(actual, expected)


def _assert_equal(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal bits, but for a NaN's."""
    assert_same_bits(actual.isnan(), expected.isnan())
    assert_same_bits(actual.nan_to_num(nan=0.0), expected.nan_to_num(nan=0.0))
