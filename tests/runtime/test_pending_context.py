"""Context that waits: what a proposal sees is there when it comes, and nothing is taken in twice."""

from __future__ import annotations

import random

import pytest
import torch

from deepinfer.models.base import DraftContext
from deepinfer.runtime import pending_context
from deepinfer.runtime.pending_context import PendingContext

WINDOW = 4


class Rings:
    """Takes the part of a drafter and of its rings: the feature of each slot and position."""

    context_size = WINDOW

    def __init__(self) -> None:
        self.records: dict[tuple[int, int], float] = {}
        self.calls: list[int] = []

    def store_context(self, context: DraftContext, caches: object) -> None:
        self.calls.append(context.positions.shape[0])
        for feature, position, slot in zip(context.features, context.positions, context.state_slots):
            key = (int(slot), int(position))
            assert key not in self.records, "taken in twice"
            self.records[key] = float(feature[0])
        assert context.max_length > max(context.positions.tolist(), default=0)


def step(rows: dict[int, int], width: int = 1) -> DraftContext:
    """One row for each slot, at these positions."""
    slots = torch.tensor(list(rows), dtype=torch.int32)
    positions = torch.tensor(list(rows.values()), dtype=torch.int32)
    features = (slots * 1000.0 + positions)[:, None].repeat(1, width)
    return DraftContext(features, positions, slots, max(rows.values()) + 1)


def expected(positions: range, slots: list[int]) -> dict[tuple[int, int], float]:
    return {(slot, p): 1000.0 * slot + p for slot in slots for p in positions}


@pytest.mark.parametrize("count", [1, WINDOW - 1, WINDOW, WINDOW + 1, 2 * WINDOW, 2 * WINDOW + 1, 30])
def test_only_what_a_proposal_sees_is_taken_in(count):
    rings = Rings()
    pending = PendingContext(rings, None)
    for position in range(count):
        pending.add(step({3: position, 5: position}), may_wait=True)
    assert rings.calls == []
    pending.settle()
    pending.settle()
    assert rings.records == expected(range(max(0, count - WINDOW), count), [3, 5])
    assert len(rings.calls) == 1


def test_a_step_that_cannot_wait_brings_the_others_along():
    rings = Rings()
    pending = PendingContext(rings, None)
    pending.add(step({1: 0, 2: 0}), may_wait=True)
    pending.add(step({2: 1}), may_wait=False)
    assert rings.calls == [3] and rings.records == {(1, 0): 1000.0, (2, 0): 2000.0, (2, 1): 2001.0}


@pytest.mark.parametrize("dropped", [[], [1], [2], [1, 2], [7]])
def test_slots_that_change_hands(dropped):
    rings = Rings()
    pending = PendingContext(rings, None)
    for position in range(3):
        pending.add(step({1: position, 2: position}), may_wait=True)
    pending.drop(torch.tensor(dropped, dtype=torch.int32))
    pending.add(step({1: 3, 2: 3}), may_wait=True)
    pending.settle()
    kept = [slot for slot in (1, 2) if slot not in dropped]
    assert rings.records == expected(range(3), kept) | expected(range(3, 4), [1, 2])


@pytest.mark.parametrize("case", range(20))
def test_sequences_that_miss_steps(case, monkeypatch):
    """Against a drafter that takes in everything at once; under little memory too."""
    rng = random.Random(case)
    monkeypatch.setattr(pending_context, "MAX_ROWS", rng.choice([1, 3, 512]))
    monkeypatch.setattr(pending_context, "MAX_BYTES", rng.choice([100, 400, 1 << 20]))
    rings, eager = Rings(), Rings()
    pending = PendingContext(rings, None)
    lengths = dict.fromkeys(range(1, 6), 0)
    for _ in range(60):
        slots = rng.sample(list(lengths), rng.randint(1, 5))
        context = step({slot: lengths[slot] for slot in sorted(slots)}, width=3)
        for slot in slots:
            lengths[slot] += 1
        proposes = rng.random() < 0.1
        eager.store_context(context, None)
        pending.add(context, may_wait=not proposes)
        if proposes:
            seen = {key for key in eager.records if key[1] >= lengths[key[0]] - WINDOW}
            assert {key: rings.records[key] for key in seen} == {key: eager.records[key] for key in seen}
    assert max(rings.calls) <= pending_context.MAX_ROWS


def test_nothing_is_left_behind_clear():
    rings = Rings()
    pending = PendingContext(rings, None)
    pending.add(step({1: 0}), may_wait=True)
    pending.clear()
    pending.settle()
    assert rings.records == {} and rings.calls == []
