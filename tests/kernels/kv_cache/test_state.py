"""Moving whole rows and ring positions: kernels against their references."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.kv_cache.values import whole
from tests.support.compare import assert_same_bits
from tests.support.kernel_runs import KernelRunner
from tilelang_ops.kv_cache.copy_rows import cuda as copy_rows_cuda
from tilelang_ops.kv_cache.copy_rows import reference as copy_rows_reference
from tilelang_ops.kv_cache.load_state_to_cache import cuda as load_state_cuda
from tilelang_ops.kv_cache.load_state_to_cache import reference as load_state_reference
from tilelang_ops.kv_cache.select_state_slice import cuda as select_state_cuda
from tilelang_ops.kv_cache.select_state_slice import reference as select_state_reference


@pytest.mark.parametrize("count", [1, 32, 33])
def test_copy_rows(run_kernel: KernelRunner, count: int) -> None:
    """Targets may be sources of other pairs."""
    pool = torch.randint(0, 256, (40, 2064), dtype=torch.uint8)
    pairs = torch.stack([torch.randint(0, 40, (count,)), torch.randperm(40)[:count]], 1).int()
    expected = pool.clone()
    copy_rows_reference.run(expected, pairs)
    assert_same_bits(run_kernel(copy_rows_cuda, pool, pairs)[1][0], expected)


@pytest.mark.parametrize(("ring", "fields", "padding"), [(15, 528, 16), (9, 36, 4)])
def test_state_slices(run_kernel: KernelRunner, ring: int, fields: int, padding: int) -> None:
    stride = ring * fields + padding
    slot = torch.randint(0, 256, (64 + 3 * stride,), dtype=torch.uint8)
    rings = slot.as_strided((3, ring, fields), (stride, fields, 1), 64)
    window = 8
    for end in (0, 1, window - 1, window, 3 * ring - 1, 3 * ring, 3 * ring + 5):
        state = run_kernel(select_state_cuda, rings, end, window)[0]
        assert_same_bits(state, select_state_reference.run(rings, end, window), f"{end=}")
        state = torch.randint(0, 256, (3, window, fields), dtype=torch.uint8)
        expected = slot.clone().as_strided(rings.shape, rings.stride(), 64)
        load_state_reference.run(state, expected, end)
        actual = run_kernel(load_state_cuda, state, rings, end)[1][1]
        assert_same_bits(whole(actual), whole(expected), f"{end=}")
