"""Context that waits: what a proposal sees is there when it comes, and nothing is taken in twice."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

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
            assert self.records.get(key) != float(feature[0]), "taken in twice"
            self.records[key] = float(feature[0])
        assert context.max_length > max(context.positions.tolist(), default=0)

    def newest(self, slot: int, length: int) -> dict[int, float | None]:
        """What a proposal behind `length` tokens sees."""
        return {p: self.records.get((slot, p)) for p in range(max(0, length - WINDOW), length)}


def step(rows: dict[int, int | range], width: int = 1, owner: int = 0) -> DraftContext:
    """Rows of slots at these positions; the features say whose they are."""
    pairs = [(slot, p) for slot, at in rows.items() for p in ([at] if isinstance(at, int) else at)]
    slots, positions = (torch.tensor(column, dtype=torch.int32) for column in zip(*pairs))
    features = (owner * 1e5 + slots * 1000.0 + positions)[:, None].repeat(1, width)
    return DraftContext(features, positions, slots, int(positions.max()) + 1)


def slots_of(*slots: int) -> Tensor:
    return torch.tensor(slots, dtype=torch.int32)


def expected(positions: range, slots: list[int]) -> dict[tuple[int, int], float]:
    return {(slot, p): 1000.0 * slot + p for slot in slots for p in positions}


@pytest.mark.parametrize("count", [1, WINDOW - 1, WINDOW, WINDOW + 1, 2 * WINDOW, 2 * WINDOW + 1, 30])
def test_only_what_a_proposal_sees_is_taken_in(count):
    rings = Rings()
    pending = PendingContext(rings, None)
    for position in range(count):
        pending.put_off(step({3: position, 5: position}))
    assert rings.calls == []
    pending.settle()
    pending.settle()
    assert rings.records == expected(range(max(0, count - WINDOW), count), [3, 5])
    assert len(rings.calls) == 1


@pytest.mark.parametrize("length", [1, WINDOW, 3 * WINDOW])
def test_chunks_of_prompts(length):
    """Many rows of a sequence at once, and those of its decode steps behind them."""
    rings = Rings()
    pending = PendingContext(rings, None)
    pending.put_off(step({7: range(length), 2: range(2)}))
    pending.put_off(step({7: range(length, length + 2)}))
    pending.settle(slots_of(7))
    assert rings.records == expected(range(max(0, length + 2 - WINDOW), length + 2), [7])
    pending.settle()
    assert rings.records.items() >= expected(range(2), [2]).items() and len(rings.calls) == 2


def test_what_is_taken_in_brings_along_what_waits_for_the_same_sequences():
    rings = Rings()
    pending = PendingContext(rings, None)
    pending.put_off(step({1: 0, 2: 0}))
    pending.take_in(step({2: 1}))
    assert rings.calls == [1, 1] and rings.records == {(2, 0): 2000.0, (2, 1): 2001.0}
    pending.settle(slots_of(2, 9))
    assert rings.calls == [1, 1]
    pending.settle()
    assert rings.calls == [1, 1, 1] and rings.records[1, 0] == 1000.0


@pytest.mark.parametrize("dropped", [[], [1], [2], [1, 2], [7]])
def test_slots_that_change_hands(dropped):
    rings = Rings()
    pending = PendingContext(rings, None)
    for position in range(3):
        pending.put_off(step({1: position, 2: position}))
    pending.drop(slots_of(*dropped))
    pending.put_off(step({1: 3, 2: 3}))
    pending.settle()
    kept = [slot for slot in (1, 2) if slot not in dropped]
    assert rings.records == expected(range(3), kept) | expected(range(3, 4), [1, 2])


@pytest.mark.parametrize("case", range(30))
def test_traffic(case, monkeypatch):
    """Against a drafter that takes in everything at once: chunks, steps that some miss, slots that change
    hands, proposals of some; under little memory too."""
    rng = random.Random(case)
    monkeypatch.setattr(pending_context, "MAX_ROWS", rng.choice([1, 3, 512]))
    monkeypatch.setattr(pending_context, "MAX_BYTES", rng.choice([12, 100, 400, 1 << 20]))
    rings, eager = Rings(), Rings()
    pending = PendingContext(rings, None)
    lengths = dict.fromkeys(range(1, 6), 0)
    owners = dict.fromkeys(lengths, 0)
    num_seen = 0
    for _ in range(80):
        slots = sorted(rng.sample(list(lengths), rng.randint(1, 5)))
        if rng.random() < 0.2:  # prompts of others
            slots = slots[:2]
            pending.drop(slots_of(*slots))
            for slot in slots:
                lengths[slot], owners[slot] = 0, owners[slot] + 1
        counts = {slot: rng.randint(1, 9) if lengths[slot] == 0 else 1 for slot in slots}
        parts = [
            step({slot: range(lengths[slot], lengths[slot] + counts[slot])}, 3, owners[slot])
            for slot in slots
        ]
        context = DraftContext(
            torch.cat([part.features for part in parts]),
            torch.cat([part.positions for part in parts]),
            torch.cat([part.state_slots for part in parts]),
            max(part.max_length for part in parts),
        )
        for slot in slots:
            lengths[slot] += counts[slot]
        eager.store_context(context, None)
        due: list[int] = []  # who proposes now
        if rng.random() < 0.1:
            pending.take_in(context)
            due = slots
        else:
            pending.put_off(context)
            if rng.random() < 0.2:
                due = rng.sample(slots, rng.randint(1, len(slots)))
                pending.settle(slots_of(*due))
        for slot in due:
            assert rings.newest(slot, lengths[slot]) == eager.newest(slot, lengths[slot])
        num_seen += len(due)
    pending.settle()
    for slot, length in lengths.items():
        assert rings.newest(slot, length) == eager.newest(slot, length)
    assert num_seen > 5
    assert max(rings.calls) <= pending_context.MAX_ROWS


def test_nothing_is_left_behind_clear():
    rings = Rings()
    pending = PendingContext(rings, None)
    pending.put_off(step({1: 0}))
    pending.clear()
    pending.settle()
    assert rings.records == {} and rings.calls == []
