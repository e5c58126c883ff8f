"""The kernels that make lists of records against their references."""

from __future__ import annotations

import pytest
import torch

from tests.support.compare import assert_same_bits
from tests.support.kernel_runs import KernelRunner
from tilelang_ops.kv_index.concat_index import cuda as concat_index_cuda
from tilelang_ops.kv_index.concat_index import reference as concat_index_reference
from tilelang_ops.kv_index.entry_slots import cuda as entry_slots_cuda
from tilelang_ops.kv_index.entry_slots import reference as entry_slots_reference
from tilelang_ops.kv_index.range_index import cuda as range_index_cuda
from tilelang_ops.kv_index.range_index import reference as range_index_reference
from tilelang_ops.kv_index.ring_index import cuda as ring_index_cuda
from tilelang_ops.kv_index.ring_index import reference as ring_index_reference
from tilelang_ops.kv_index.visible_entries import cuda as visible_entries_cuda
from tilelang_ops.kv_index.visible_entries import reference as visible_entries_reference
from tilelang_ops.kv_index.window_index import cuda as window_index_cuda
from tilelang_ops.kv_index.window_index import reference as window_index_reference


@pytest.mark.parametrize(("window", "dtype"), [(128, torch.int32), (133, torch.int64)])
def test_window_index(run_kernel: KernelRunner, window: int, dtype: torch.dtype) -> None:
    edges = torch.tensor([-1, 0, 1, window - 2, window - 1, window, 139, 140, 1 << 20])
    for count in (1, 9):
        positions = edges[-count:].to(dtype)
        for ring in (0, 140):
            base = torch.randint(0, 70, (count,)) * 140
            actual = run_kernel(window_index_cuda, positions, base, window, ring)[0]
            assert_same_bits(actual, window_index_reference.run(positions, base, window, ring), f"{ring=}")


@pytest.mark.parametrize(("k", "dtype"), [(512, torch.int32), (1, torch.int64)])
def test_entry_slots(run_kernel: KernelRunner, k: int, dtype: torch.dtype) -> None:
    block_tables = torch.randint(0, 5000, (7, 30), dtype=torch.int32)
    for count in (1, 13):
        entries = torch.randint(-1, 30 * 64, (count, k)).to(dtype)
        entries[torch.rand(count, k) < 0.3] = -1
        row_seq = torch.randint(0, 7, (count,), dtype=torch.int32)
        actual = run_kernel(entry_slots_cuda, entries, row_seq, block_tables, 64)[0]
        assert_same_bits(actual, entry_slots_reference.run(entries, row_seq, block_tables, 64), f"{count=}")


def test_visible_entries(run_kernel: KernelRunner) -> None:
    for num_visible in ([0], [512], [1, 511, 0, 512, 3]):
        visible = torch.tensor(num_visible, dtype=torch.int32)
        actual = run_kernel(visible_entries_cuda, visible, 512)[0]
        assert_same_bits(actual, visible_entries_reference.run(visible, 512))


def test_concat_index(run_kernel: KernelRunner) -> None:
    for count in (1, 5):
        window, selected = (torch.randint(-1, 9, (count, size), dtype=torch.int32) for size in (128, 512))
        actual = run_kernel(concat_index_cuda, window, selected, 3, 1000)[0]
        assert_same_bits(actual, concat_index_reference.run(window, selected, 3, 1000))


@pytest.mark.parametrize("is_paged", [False, True])
def test_range_index(run_kernel: KernelRunner, is_paged: bool) -> None:
    for lens in ([1], [0], [130, 0, 1, 0], [0, 5, 0, 0, 127, 128, 3]):
        cu_lens = torch.tensor([0, *lens]).cumsum(0).int()
        firsts = torch.randint(-4, 200, (len(lens),), dtype=torch.int32)
        tables = torch.randint(0, 5000, (len(lens), 12 if is_paged else 1), dtype=torch.int32)
        for total in (sum(lens), sum(lens) + 3):
            if total > 0:
                args = cu_lens, firsts, tables, total, 32, is_paged
                assert_same_bits(run_kernel(range_index_cuda, *args)[0], range_index_reference.run(*args))


def test_ring_index(run_kernel: KernelRunner) -> None:
    for n in (1, 130):
        slots, positions = (torch.randint(0, 10**6, (n,), dtype=torch.int32) for _ in range(2))
        expected = ring_index_reference.run(slots, positions, 134)
        for kind in (torch.int32, torch.int64):
            actual = run_kernel(ring_index_cuda, slots.to(kind), positions, 134)[0]
            assert_same_bits(actual, expected, f"{n=} {kind}")
