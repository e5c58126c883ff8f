"""Pooling of groups against a per-sequence definition, in any cut of the rows into steps."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.support.compare import assert_same_bits
from tilelang_ops.compressor import pool_groups

WIDTH = 24


def pooled_directly(states: Tensor, ratio: int) -> Tensor:
    """[length, 2, width] of a whole sequence -> float64 [length // ratio, width]."""
    groups = states[: states.shape[0] // ratio * ratio].double().unflatten(0, (-1, ratio))
    return (groups[:, :, 0].softmax(dim=1) * groups[:, :, 1]).sum(1)


def feed(pool: Tensor, parts: list[tuple[int, Tensor, int]], ratio: int) -> list[Tensor]:
    """One step: (slot, states of the new rows, first position) of each sequence; pooled groups of each."""
    states = torch.cat([part for _, part, _ in parts])
    positions = torch.cat([torch.arange(start, start + part.shape[0]) for _, part, start in parts])
    slots = torch.cat([torch.full((part.shape[0],), slot) for slot, part, _ in parts])
    preceding = torch.cat([torch.arange(part.shape[0]) for _, part, _ in parts])
    following = torch.cat([torch.arange(part.shape[0]).flip(0) for _, part, _ in parts])
    is_end = (positions + 1) % ratio == 0
    pooled = pool_groups(
        states, pool, is_end.nonzero().flatten(), positions, slots, preceding, following, ratio
    )
    counts = [int(part.sum()) for part in is_end.split([part.shape[0] for _, part, _ in parts])]
    return list(pooled.split(counts))


@pytest.mark.parametrize("ratio", [2, 4])
@pytest.mark.parametrize("step", [1, 2, 3, 5, 8, 100])
def test_any_cut_gives_the_groups(ratio: int, step: int) -> None:
    """A ring that is NaN at first: only what earlier steps stored is read."""
    pool = torch.full((5, ratio + 5, 2, WIDTH), torch.nan)
    states = torch.randn(37, 2, WIDTH) * 3
    parts = []
    for start in range(0, 37, step):
        parts += feed(pool, [(3, states[start : start + step], start)], ratio)
    result = torch.cat(parts)
    torch.testing.assert_close(result.double(), pooled_directly(states, ratio), rtol=1e-5, atol=1e-6)
    whole = feed(torch.full_like(pool, torch.nan), [(1, states, 0)], ratio)[0]
    assert_same_bits(result, whole)


def test_sequences_do_not_mix() -> None:
    pool = torch.full((4, 7, 2, WIDTH), torch.nan)
    states = [torch.randn(length, 2, WIDTH) for length in (9, 4, 15)]
    cuts = [[0, 3, 4, 9], [0, 1, 2, 4], [0, 7, 8, 15]]
    results: list[list[Tensor]] = [[], [], []]
    for number in range(3):
        parts = [
            (slot, states[i][cuts[i][number] : cuts[i][number + 1]], cuts[i][number])
            for i, slot in enumerate((2, 3, 1))
        ]
        for i, part in enumerate(feed(pool, parts, 2)):
            results[i].append(part)
    for i in range(3):
        alone = feed(torch.full_like(pool, torch.nan), [(1, states[i], 0)], 2)[0]
        assert_same_bits(torch.cat(results[i]), alone)
    assert pool[0].isnan().all()


@pytest.mark.parametrize("kept", range(1, 6))
def test_taking_back(kept: int) -> None:
    """Six rows are fed, `kept` of them stay, the rest is fed again with other values."""
    pool = torch.full((2, 7, 2, WIDTH), torch.nan)
    states = torch.randn(40, 2, WIDTH)
    feed(pool, [(1, states[:11], 0)], 2)
    start, found = 11, {}
    while start + 6 <= 40:
        drafted = states[start : start + 6].clone()
        drafted[kept:] = torch.randn_like(drafted[kept:])
        groups = feed(pool, [(1, drafted, start)], 2)[0]
        ends = [p for p in range(start, start + 6) if p % 2 == 1]
        found |= {p: g for p, g in zip(ends, groups, strict=True) if p < start + kept}
        start += kept
    whole = feed(torch.full_like(pool, torch.nan), [(1, states, 0)], 2)[0]
    for position, group in found.items():
        assert_same_bits(group, whole[position // 2], f"{position=}")


def test_large_scores_do_not_overflow() -> None:
    states = torch.randn(2, 2, WIDTH)
    states[:, 0] = torch.tensor([[1e30], [-1e30]])
    pooled = feed(torch.zeros(1, 7, 2, WIDTH), [(0, states, 0)], 2)[0]
    assert_same_bits(pooled[0], states[0, 1])


def test_no_rows() -> None:
    none = torch.empty(0, dtype=torch.int64)
    pooled = pool_groups(torch.empty(0, 2, 8), torch.zeros(1, 7, 2, 8), none, none, none, none, none, 2)
    assert pooled.shape == (0, 8)
