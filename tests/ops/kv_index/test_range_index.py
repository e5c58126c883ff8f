"""Runs of positions, lists of visible entries and joined lists, against plain loops."""

from __future__ import annotations

import torch

from tilelang_ops.kv_index import concat_index, paged_range_index, ring_range_index, visible_entries


def test_runs_go_through_tables_and_rings() -> None:
    lens, firsts = [3, 0, 5, 1], [6, 2, -2, 11]
    cu_lens = torch.tensor([0, 3, 3, 8, 9], dtype=torch.int32)
    tables = torch.randint(1, 50, (4, 4), dtype=torch.int32)
    starts = torch.tensor(firsts, dtype=torch.int32)
    paged, ring = [], []
    for seq, (first, count) in enumerate(zip(firsts, lens, strict=True)):
        for item in range(first, first + count):
            paged.append(int(tables[seq, item // 4]) * 4 + item % 4 if item >= 0 else -1)
            ring.append(int(tables[seq, 0]) * 7 + item % 7 if item >= 0 else -1)
    for total in (9, 12):
        behind = [-1] * (total - 9)
        assert paged_range_index(cu_lens, starts, tables, total, 4).tolist() == paged + behind
        slots = tables[:, 0].contiguous()
        assert ring_range_index(cu_lens, starts, slots, total, 7).tolist() == ring + behind
    assert ring_range_index(cu_lens[:1], starts[:0], tables[:0, 0], 0, 7).shape == (0,)


def test_visible_entries() -> None:
    found = visible_entries(torch.tensor([0, 2, 3], dtype=torch.int32), 3)
    assert found.tolist() == [[-1, -1, -1], [0, 1, -1], [0, 1, 2]]
    assert visible_entries(torch.empty(0, dtype=torch.int32), 3).shape == (0, 3)


def test_joined_lists() -> None:
    window = torch.tensor([[-1, 4], [0, 1]], dtype=torch.int32)
    selected = torch.tensor([[2, -1, -1], [0, 3, 9]], dtype=torch.int32)
    joined = concat_index(window, selected, 0, 100)
    assert joined.dtype == torch.int32
    assert joined.tolist() == [[-1, 4, 102, -1, -1], [0, 1, 100, 103, 109]]
    assert concat_index(window, selected, 7, 0)[0].tolist() == [-1, 11, 2, -1, -1]
    assert concat_index(window[:0], selected[:0], 0, 0).shape == (0, 5)
