"""Copying records between strided pools."""

from __future__ import annotations

import pytest
import torch

from tests.ops.kv_cache.pools import make_pool
from tests.support.compare import assert_same_bits
from tilelang_ops.kv_cache import copy_records


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
@pytest.mark.parametrize(
    ("src_index", "dst_index"),
    [([], []), ([-1], [0]), ([0], [-1]), ([11, 5, 5, -1, 0], [0, 7, 3, 1, -1]), ([2, 9], [9, 2])],
)
@pytest.mark.parametrize("parts", [1, 3])
def test_copies_pairs(dtype: torch.dtype, src_index: list[int], dst_index: list[int], parts: int) -> None:
    _, src = make_pool(4, 3, 24, dtype, gap=2, offset=40)
    buffer, dst = make_pool(parts, 12 // parts, 24, dtype, gap=1, offset=16)
    expected = buffer.clone()
    expected_dst = expected.as_strided(dst.shape, dst.stride(), 16)
    for source, target in zip(src_index, dst_index, strict=True):
        if source >= 0 and target >= 0:
            expected_dst[target // dst.shape[1], target % dst.shape[1]] = src[source // 3, source % 3]
    copy_records(
        src, torch.tensor(src_index, dtype=torch.int64), dst, torch.tensor(dst_index, dtype=torch.int64)
    )
    assert_same_bits(buffer, expected)


def test_record_sizes_must_agree() -> None:
    one = torch.tensor([0])
    with pytest.raises(AssertionError, match="shape"):
        copy_records(torch.zeros(1, 1, 8), one, torch.zeros(1, 1, 9), one)


def test_a_part_must_be_whole_records_apart() -> None:
    one = torch.tensor([0])
    crooked = torch.zeros(40).as_strided((2, 2, 8), (17, 8, 1))
    with pytest.raises(AssertionError, match="stride"):
        copy_records(torch.zeros(1, 1, 8), one, crooked, one)
