"""Context that waits: the drafter takes in the same rows, only later and together."""

from __future__ import annotations

import pytest
import torch

from deepinfer.models.base import DraftContext
from deepinfer.runtime.pending_context import MAX_ROWS, MAX_STEPS, PendingContext


class Rings:
    """Takes the part of a drafter and of its rings: the last feature of each slot and position."""

    def __init__(self) -> None:
        self.records: dict[tuple[int, int], float] = {}
        self.calls: list[int] = []

    def store_context(self, context: DraftContext, caches: object) -> None:
        self.calls.append(context.positions.shape[0])
        for feature, position, slot in zip(context.features, context.positions, context.state_slots):
            key = (int(slot), int(position))
            assert key not in self.records, "two rows of one call for one record"
            self.records[key] = float(feature)
        assert context.max_length > int(context.positions.max())


def step(position: int, slots: list[int]) -> DraftContext:
    slots_tensor = torch.tensor(slots, dtype=torch.int32)
    features = slots_tensor[:, None] * 1000.0 + position
    return DraftContext(features, torch.full_like(slots_tensor, position), slots_tensor, position + 1)


def expected(positions: range, slots: list[int]) -> dict[tuple[int, int], float]:
    return {(slot, p): 1000.0 * slot + p for slot in slots for p in positions}


@pytest.mark.parametrize("count", [1, MAX_STEPS - 1, MAX_STEPS, MAX_STEPS + 1, 3 * MAX_STEPS])
def test_waiting_steps_are_taken_in_together(count):
    rings = Rings()
    pending = PendingContext(rings, None)
    for position in range(count):
        pending.add(step(position, [3, 5]), may_wait=True)
    assert rings.calls == [2 * MAX_STEPS] * (count // MAX_STEPS)
    pending.settle()
    pending.settle()
    assert rings.records == expected(range(count), [3, 5])
    assert len(rings.calls) == -(-count // MAX_STEPS)


@pytest.mark.parametrize("width", [MAX_ROWS // 4, MAX_ROWS // 4 + 1, MAX_ROWS, 2 * MAX_ROWS])
def test_rows_are_bounded(width):
    rings = Rings()
    pending = PendingContext(rings, None)
    for position in range(4):
        pending.add(step(position, list(range(1, width + 1))), may_wait=True)
        assert sum(rings.calls) > (position + 1) * width - MAX_ROWS
    pending.settle()
    assert rings.records == expected(range(4), list(range(1, width + 1)))


def test_a_step_that_cannot_wait_brings_the_others_along():
    rings = Rings()
    pending = PendingContext(rings, None)
    pending.add(step(0, [1, 2]), may_wait=True)
    pending.add(step(1, [2]), may_wait=False)
    assert rings.calls == [3] and rings.records == {(1, 0): 1000.0, (2, 0): 2000.0, (2, 1): 2001.0}


@pytest.mark.parametrize("dropped", [[], [1], [2], [1, 2], [7]])
def test_slots_that_change_hands(dropped):
    rings = Rings()
    pending = PendingContext(rings, None)
    for position in range(3):
        pending.add(step(position, [1, 2]), may_wait=True)
    pending.drop(torch.tensor(dropped, dtype=torch.int32))
    pending.add(step(3, [1, 2]), may_wait=True)
    pending.settle()
    kept = [slot for slot in (1, 2) if slot not in dropped]
    assert rings.records == expected(range(3), kept) | expected(range(3, 4), [1, 2])


def test_nothing_is_left_behind_clear():
    rings = Rings()
    pending = PendingContext(rings, None)
    pending.add(step(0, [1]), may_wait=True)
    pending.clear()
    pending.settle()
    assert rings.records == {} and rings.calls == []
