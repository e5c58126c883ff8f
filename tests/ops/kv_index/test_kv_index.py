"""Index lists against brute force in Python."""

from __future__ import annotations

import math

import pytest
import torch

from tests.support.compare import assert_same_bits, check_against_cpu
from tilelang_ops.kv_index import (
    candidate_blocks,
    entry_slots,
    select_entries,
    window_index,
)


@pytest.mark.parametrize("window", [1, 2, 7, 128])
@pytest.mark.parametrize("ring", [0, 134, 128])
def test_window_index(device: str, window: int, ring: int) -> None:
    positions = torch.tensor([0, 1, 6, 127, 128, 133, 134, 1000])
    base = torch.tensor([0, 134, 268, 5, 134, 0, 402, -900])
    index = window_index(positions, base, window, ring)
    for row, (p, b) in enumerate(zip(positions.tolist(), base.tolist(), strict=True)):
        expected = [-1 if t < 0 else b + (t % ring if ring else t) for t in range(p - window + 1, p + 1)]
        assert index[row].tolist() == expected
    assert index.dtype == torch.int32
    assert window_index(positions[:0], base[:0], window, ring).shape == (0, window)
    check_against_cpu(window_index, positions, base, window, ring, device=device, bitwise=True)


def test_entry_slots(device: str) -> None:
    tables = torch.tensor([[5, 9, 0], [2, 0, 0]], dtype=torch.int32)
    entries = torch.tensor([[0, 63, 64, -1], [127, -1, -1, -1], [1, 2, -1, -1]], dtype=torch.int32)
    row_seq = torch.tensor([0, 0, 1], dtype=torch.int32)
    slots = entry_slots(entries, row_seq, tables, 64)
    expected = [
        [5 * 64, 5 * 64 + 63, 9 * 64, -1],
        [9 * 64 + 63, -1, -1, -1],
        [2 * 64 + 1, 2 * 64 + 2, -1, -1],
    ]
    assert slots.tolist() == expected and slots.dtype == torch.int32
    assert entry_slots(entries[:0], row_seq[:0], tables, 64).shape == (0, 4)
    check_against_cpu(entry_slots, entries, row_seq, tables, 64, device=device, bitwise=True)


def _best(scores: list[float], k: int) -> list[int]:
    order = sorted(range(len(scores)), key=lambda column: (-scores[column], column))
    chosen = sorted(column for column in order[:k] if scores[column] > -math.inf)
    return chosen + [-1] * (k - len(chosen))


@pytest.mark.parametrize("width", [1, 5, 16, 63, 300])
@pytest.mark.parametrize("k", [1, 4, 16, 64])
@pytest.mark.parametrize("levels", [2, 7, 10**6])
def test_select_entries(device: str, width: int, k: int, levels: int) -> None:
    """Few levels make many ties; a third of the columns is hidden."""
    scores = torch.randint(-levels, levels + 1, (20, width)) / 8
    scores = torch.where(torch.rand(20, width) < 0.3, -torch.inf, scores)
    selected = select_entries(scores, k)
    assert selected.dtype == torch.int32
    assert selected.tolist() == [_best(row, k) for row in scores.tolist()]
    check_against_cpu(select_entries, scores, k, device=device, bitwise=True)


def test_select_entries_at_the_edges() -> None:
    """Zeros of both signs tie; infinities, subnormals and large values are ordered."""
    values = [0.0, -0.0, 1e-45, -1e-45, torch.inf, -torch.inf, 3e38, -3e38, 0.0]
    for k in range(1, 11):
        assert select_entries(torch.tensor([values]), k)[0].tolist() == _best(values, k)
    assert select_entries(torch.empty(3, 0), 2).tolist() == [[-1, -1]] * 3
    assert select_entries(torch.empty(0, 5), 2).shape == (0, 2)
    assert select_entries(torch.full((1, 5), -torch.inf), 2).tolist() == [[-1, -1]]


def test_select_entries_with_nan_stays_in_range() -> None:
    scores = torch.randn(4, 30)
    scores[1, 3], scores[2] = torch.nan, torch.nan
    selected = select_entries(scores, 8)
    assert ((selected >= -1) & (selected < 30)).all()
    assert_same_bits(selected[::3], select_entries(scores[::3], 8))


def test_select_entries_does_not_depend_on_the_width() -> None:
    scores = torch.randn(6, 40)
    wide = torch.nn.functional.pad(scores, (0, 500), value=-torch.inf)
    for k in (3, 40, 50):
        assert_same_bits(select_entries(wide, k), select_entries(scores, k))


def _best_blocks(scores: list[float], visible: int, size: int, k: int) -> list[int]:
    blocks = [max(scores[start : min(start + size, visible)]) for start in range(0, visible, size)]
    if blocks:
        blocks[-1] = math.inf
    return _best(blocks, k)


@pytest.mark.parametrize("size", [1, 4, 8])
@pytest.mark.parametrize("k", [1, 3, 64])
@pytest.mark.parametrize("width", [1, 8, 9, 77])
def test_candidate_blocks(device: str, size: int, k: int, width: int) -> None:
    num_visible = torch.randint(0, width + 1, (30,), dtype=torch.int32)
    num_visible[:3] = torch.tensor([0, 1, width])
    scores = torch.randint(-3, 4, (30, width)).float()
    scores = torch.where(torch.arange(width) < num_visible[:, None], scores, -torch.inf)
    blocks = candidate_blocks(scores, num_visible, size, k)
    expected = [
        _best_blocks(row, visible, size, k)
        for row, visible in zip(scores.tolist(), num_visible.tolist(), strict=True)
    ]
    assert blocks.tolist() == expected and blocks.dtype == torch.int32
    check_against_cpu(candidate_blocks, scores, num_visible, size, k, device=device, bitwise=True)


def test_last_visible_block_is_always_kept() -> None:
    scores = torch.tensor([[5.0, 4.0, 3.0, 2.0, 1.0, -torch.inf]])
    assert candidate_blocks(scores, torch.tensor([5]), 1, 2).tolist() == [[0, 4]]
