"""The kernels that store records against their references: every byte, and none beside them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.kernels.kv_cache.values import corner_vectors, whole
from tests.ops.kv_cache.pools import make_pool
from tests.support.compare import assert_same_bits
from tests.support.kernel_runs import KernelRunner
from tilelang_ops.kv_cache.store_index_keys import cuda as index_keys_cuda
from tilelang_ops.kv_cache.store_index_keys import reference as index_keys_reference
from tilelang_ops.kv_cache.store_main import cuda as main_cuda
from tilelang_ops.kv_cache.store_main import reference as main_reference
from tilelang_ops.kv_cache.store_window import cuda as window_cuda
from tilelang_ops.kv_cache.store_window import reference as window_reference

# Of each kind: backend, meaning; bytes of a record, of its codes, of codes under a scale; a scale of NaN.
STORES = {
    "window": (window_cuda, window_reference, 528, 512, 32, 0xFF),
    "main": (main_cuda, main_reference, 288, 256, 8, 0x7F),
}
ROWS = [1, 3, 40]


def forget_faults(codes: Tensor, scales: Tensor, group: int, nan: int) -> None:
    """Zero the codes under NaN scales, which mean nothing."""
    codes[(scales == nan).repeat_interleave(group, dim=-1)] = 0


@pytest.mark.parametrize("name", STORES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_records(run_kernel: KernelRunner, name: str, dtype: torch.dtype) -> None:
    cuda, reference, num_bytes, *kind = STORES[name]
    for num_rows in ROWS:
        values = corner_vectors(num_rows, 512, dtype)
        for parts, gap in ((1, 0), (7, 3)):
            _, pool = make_pool(parts, 112 // parts, num_bytes, torch.uint8, gap, offset=64)
            index = torch.randperm(112)[:num_rows].masked_fill(torch.rand(num_rows) < 0.2, -1)
            expected = whole(pool).clone().as_strided(pool.shape, pool.stride(), pool.storage_offset())
            reference.run(values, expected, index)
            actual = run_kernel(cuda, values, pool, index)[1][1]
            for pool in (actual, expected):
                forget_faults(pool[..., : kind[0]], pool[..., kind[0] :], *kind[1:])
            assert_same_bits(whole(actual), whole(expected), f"{num_rows=} {parts=}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_index_keys(run_kernel: KernelRunner, dtype: torch.dtype) -> None:
    for num_rows in ROWS:
        keys = corner_vectors(num_rows, 128, dtype)
        _, codes = make_pool(7, 16, 64, torch.uint8, gap=5, offset=0)
        _, scales = make_pool(7, 16, 4, torch.uint8, gap=140, offset=32)
        index = torch.randperm(112)[:num_rows].masked_fill(torch.rand(num_rows) < 0.2, -1)
        expected = [
            whole(p).clone().as_strided(p.shape, p.stride(), p.storage_offset()) for p in (codes, scales)
        ]
        index_keys_reference.run(keys, *expected, index)
        actual = run_kernel(index_keys_cuda, keys, codes, scales, index)[1][1:3]
        for pools in (actual, expected):
            forget_faults(*pools, 16, 0xFF)
        for a, b in zip(actual, expected, strict=True):
            assert_same_bits(whole(a), whole(b), f"{num_rows=}")


def test_floats(run_kernel: KernelRunner) -> None:
    for values in (torch.randn(5, 512), torch.randn(3, 512).bfloat16()):
        _, pool = make_pool(3, 4, 512, torch.float32, gap=1, offset=8)
        index = torch.randperm(12)[: values.shape[0]]
        index[1] = -1
        expected = whole(pool).clone().as_strided(pool.shape, pool.stride(), pool.storage_offset())
        main_reference.run(values, expected, index)
        for cuda in (window_cuda, main_cuda):
            assert_same_bits(whole(run_kernel(cuda, values, pool, index)[1][1]), whole(expected))
        actual = run_kernel(index_keys_cuda, values, pool, None, index)[1][1]
        assert_same_bits(whole(actual), whole(expected))


@pytest.mark.parametrize("name", STORES)
def test_a_row_does_not_know_its_neighbours(run_kernel: KernelRunner, name: str) -> None:
    cuda, _, num_bytes, *_ = STORES[name]
    values = corner_vectors(9, 512, torch.bfloat16).nan_to_num()
    pool = torch.zeros(1, 9, num_bytes, dtype=torch.uint8)
    together = run_kernel(cuda, values, pool, torch.arange(9))[1][1]
    for row in (0, 4, 8):
        alone = run_kernel(cuda, values[row : row + 1].clone(), pool, torch.tensor([2]))[1][1]
        assert_same_bits(alone[0, 2], together[0, row])
