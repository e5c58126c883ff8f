"""copy_records' kernel against its reference."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.kv_cache.values import whole
from tests.ops.kv_cache.pools import make_pool
from tests.support.compare import assert_same_bits
from tests.support.kernel_runs import KernelRunner
from tilelang_ops.kv_cache.copy_records import cuda, reference


@pytest.mark.parametrize(("dtype", "fields"), [(torch.uint8, 528), (torch.uint8, 36), (torch.float32, 9)])
def test_copy_records(run_kernel: KernelRunner, dtype: torch.dtype, fields: int) -> None:
    for src_parts, dst_parts in ((1, 4), (4, 1), (3, 6)):
        _, src = make_pool(src_parts, 48 // src_parts, fields, dtype, gap=2, offset=4 * fields)
        _, dst = make_pool(dst_parts, 48 // dst_parts, fields, dtype, gap=1, offset=0)
        for count in (1, 30):
            src_index = torch.randint(-1, 48, (count,))
            dst_index = torch.randperm(48)[:count].masked_fill(torch.rand(count) < 0.2, -1)
            expected = whole(dst).clone().as_strided(dst.shape, dst.stride(), 0)
            reference.run(src, src_index, expected, dst_index)
            actual = run_kernel(cuda, src, src_index, dst, dst_index)[1][2]
            assert_same_bits(whole(actual), whole(expected), f"{src_parts=} {dst_parts=} {count=}")
