"""The device-side correction of a batch planned one step behind, against lists of tokens in plain Python."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch
from torch import Tensor

from deepinfer.runtime.async_batch import (
    DeviceStep,
    NgramVocab,
    Remap,
    correct_batch,
    deal,
    with_seqlens_q,
)
from deepinfer.runtime.batch import Batch
from tilelang_ops.speculative import redistribute
from tilelang_ops.speculative.redistribute.reference import corrected_survivals

VOCAB = 50
PAD = 0  # compressed id
BARRIER = -7  # stands for the compressed id of a token that windows do not reach across
NO_ROW = -1


def int32(values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def draw(count: int) -> list[int]:
    """Random token ids."""
    return [random.randrange(VOCAB) for _ in range(count)]


def window(compressed: list[int], position: int, width: int) -> list[int]:
    """Compressed ids at `position`, `position - 1`, ..., pad before the start and from a barrier on."""
    found = []
    for place in range(position, position - width, -1):
        if place < 0 or compressed[place] == BARRIER:
            break
        found.append(compressed[place])
    return found + [PAD] * (width - len(found))


class World:
    """Sequences as lists, and what host and device know of them when the host is one step behind.

    Args:
        matched: per sequence of the new step, whether the step before had it.
        num_drafts: k of the engine.
        seqlens_q: rows of each sequence in the new step.
        max_ngram: columns of the n-gram windows.
        lengths: per sequence, committed tokens before the step in flight.
        emitted: per sequence, tokens that the step in flight emits (1 ... k + 1).
        num_strangers: sequences of the step before that are not in the new one.
        num_barriers: tokens of the vocabulary that end n-gram windows.
    """

    def __init__(
        self,
        matched: list[bool],
        num_drafts: int,
        seqlens_q: list[int],
        *,
        max_ngram: int = 4,
        lengths: list[int] | None = None,
        emitted: list[int] | None = None,
        num_strangers: int = 2,
        num_barriers: int = 0,
    ) -> None:
        count = len(matched)
        self.matched, self.num_drafts, self.seqlens_q, self.max_ngram = (
            matched,
            num_drafts,
            seqlens_q,
            max_ngram,
        )
        lengths = [random.randint(1, 9) for _ in range(count)] if lengths is None else lengths
        most = num_drafts + 1
        self.num_emitted = [random.randint(1, most) for _ in range(count)] if emitted is None else emitted
        self.committed = [draw(n) for n in lengths]  # what the host knows
        self.fresh = [
            draw(n) if m else [] for n, m in zip(self.num_emitted, matched)
        ]  # of the step in flight
        self.drafts = [draw(num_drafts) for _ in range(count)]
        self.barriers = random.sample(range(VOCAB), num_barriers)
        self.token_map = [random.randrange(1, 1000) for _ in range(VOCAB)]

        places = random.sample(range(count + num_strangers), count)  # rows in the step before
        self.remap = [place if m else NO_ROW for place, m in zip(places, matched)]
        rows = count + num_strangers
        emitted_rows, draft_rows, emitted_counts = [], [], []
        for row in range(rows):
            seq = places.index(row) if row in places and matched[places.index(row)] else None
            tokens = draw(random.randint(0, most)) if seq is None else self.fresh[seq]
            emitted_rows.append(tokens + [0] * (most - len(tokens)))
            emitted_counts.append(len(tokens))
            draft_rows.append(draw(num_drafts) if seq is None else self.drafts[seq])
        self.previous = DeviceStep(
            int32(emitted_rows), int32(emitted_counts), int32(draft_rows) if num_drafts else None
        )

    def row_tokens(self, seq: int) -> list[int]:
        """The sequence with its drafts, as it really is."""
        return self.committed[seq] + self.fresh[seq] + self.drafts[seq]

    def start(self, seq: int) -> int:
        """Position of the sequence's first row: its last token's."""
        return len(self.committed[seq]) + len(self.fresh[seq]) - 1

    def compressed(self, tokens: list[int]) -> list[int]:
        return [BARRIER if token in self.barriers else self.token_map[token] for token in tokens]

    def true_batch(self, seqlens_q: list[int] | None = None) -> dict[str, list]:
        """Every array that a step of the sequences' real state has."""
        seqlens_q = self.seqlens_q if seqlens_q is None else seqlens_q
        arrays: dict[str, list] = {name: [] for name in ("input_ids", "positions", "row_seq", "ngram_ids")}
        for seq, rows in enumerate(seqlens_q):
            tokens, start = self.row_tokens(seq), self.start(seq)
            for position in range(start, start + rows):
                arrays["input_ids"].append(tokens[position])
                arrays["positions"].append(position)
                arrays["row_seq"].append(seq)
                arrays["ngram_ids"].append(window(self.compressed(tokens), position, self.max_ngram))
        arrays["seqlens_k"] = [self.start(seq) + rows for seq, rows in enumerate(seqlens_q)]
        arrays["total_lens"] = arrays["seqlens_k"]
        return arrays

    def planned(self) -> Batch:
        """What the host planned: matched sequences have accepted everything and hold no ids yet."""
        arrays = self.true_batch()
        row = 0
        for seq, rows in enumerate(self.seqlens_q):
            if self.matched[seq]:
                surplus = self.num_drafts + 1 - len(self.fresh[seq])
                for place in range(row, row + rows):
                    arrays["input_ids"][place] = 0
                    arrays["positions"][place] += surplus
                    arrays["ngram_ids"][place] = [PAD] * self.max_ngram
                arrays["seqlens_k"][seq] += surplus
            row += rows
        ends = torch.tensor(self.seqlens_q).cumsum(0).tolist()
        count = len(self.seqlens_q)
        return Batch(
            input_ids=int32(arrays["input_ids"]),
            positions=int32(arrays["positions"]),
            row_seq=int32(arrays["row_seq"]),
            ngram_ids=int32(arrays["ngram_ids"]).view(row, self.max_ngram),
            cu_seqlens_q=int32([0, *ends]),
            seqlens_k=int32(arrays["seqlens_k"]),
            state_slots=torch.arange(1, count + 1, dtype=torch.int32),
            block_tables=torch.arange(count * 3, dtype=torch.int32).view(count, 3),
            total_lens=int32(arrays["seqlens_k"]),
            keep_all=torch.zeros(count, dtype=torch.int32),
            window_starts=torch.arange(count, dtype=torch.int32),
            output_rows=torch.arange(row, dtype=torch.int32),
            max_seqlen_k=max(arrays["seqlens_k"]),
            is_prefill=False,
        )

    def host(self) -> Remap:
        width = max(0, self.max_ngram - 1)
        history = [
            window(self.compressed(tokens), len(tokens) - 1, width) if width else []
            for tokens in self.committed
        ]
        return Remap(
            int32(self.remap),
            int32([len(tokens) for tokens in self.committed]),
            int32(history).view(len(self.committed), width),
        )

    def correct(self, batch: Batch | None = None) -> Batch:
        batch = self.planned() if batch is None else batch
        is_barrier = torch.zeros(VOCAB, dtype=torch.bool)
        is_barrier[self.barriers] = True
        vocab = NgramVocab(int32(self.token_map), is_barrier, PAD)
        return correct_batch(batch, self.host(), self.previous, vocab)


def check(batch: Batch, expected: dict[str, list]) -> None:
    for name, values in expected.items():
        tensor = getattr(batch, name)
        assert tensor.dtype == torch.int32 and tensor.is_contiguous(), name
        assert tensor.tolist() == values, f"{name}: {tensor.tolist()} instead of {values}"


def random_world(**options: object) -> World:
    count, k = random.randint(1, 7), random.randint(0, 5)
    matched = [random.random() < 0.7 for _ in range(count)]
    seqlens_q = [random.randint(1, k + 1) for _ in range(count)]
    barriers = random.choice([0, 0, VOCAB // 4])
    return World(matched, k, seqlens_q, max_ngram=random.randint(1, 5), num_barriers=barriers, **options)


@pytest.mark.parametrize("case", range(8))
def test_a_corrected_batch_is_the_real_one(case):
    for _ in range(40):
        world = random_world()
        check(world.correct(), world.true_batch())


@pytest.mark.parametrize("case", range(8))
def test_only_what_can_be_wrong_changes(case):
    world = random_world()
    planned = world.planned()
    before = dataclasses.replace(
        planned, **{name: getattr(planned, name).clone() for name in Batch.tensor_names()}
    )
    corrected = world.correct(planned)
    for name in Batch.tensor_names():
        assert torch.equal(getattr(planned, name), getattr(before, name)), f"the plan's {name} was written to"
        if name not in ("input_ids", "positions", "seqlens_k", "total_lens", "ngram_ids"):
            assert getattr(corrected, name) is getattr(planned, name), name
    assert (corrected.max_seqlen_k, corrected.is_prefill) == (planned.max_seqlen_k, False)
    assert int(corrected.seqlens_k.max()) <= planned.max_seqlen_k, "host lengths are the most possible"


def test_without_a_matched_row_nothing_changes():
    world = World([False] * 4, 3, [1, 4, 2, 3])
    planned = world.planned()
    corrected = world.correct(planned)
    for name in Batch.tensor_names():
        assert torch.equal(getattr(corrected, name), getattr(planned, name)), name
    check(corrected, world.true_batch())


@pytest.mark.parametrize("max_ngram", [1, 2, 4])
def test_without_drafts(max_ngram):
    world = World([True, False, True], 0, [1, 1, 1], max_ngram=max_ngram)
    check(world.correct(), world.true_batch())


@pytest.mark.parametrize("emitted", range(1, 7))
@pytest.mark.parametrize("rows", [1, 3, 6])
@pytest.mark.parametrize("length", [1, 2, 3, 4, 9])
def test_windows_reach_from_drafts_over_emitted_tokens_into_the_history(emitted, rows, length):
    """Also where the whole sequence is shorter than a window."""
    world = World([True], 5, [rows], max_ngram=4, lengths=[length], emitted=[emitted])
    check(world.correct(), world.true_batch())


def test_a_window_wider_than_everything_known():
    world = World([True, True], 1, [2, 1], max_ngram=8, lengths=[1, 2], emitted=[1, 2])
    check(world.correct(), world.true_batch())


def test_a_model_without_ngrams():
    world = World([True, False], 2, [3, 2], max_ngram=0)
    expected = world.true_batch()
    corrected = correct_batch(world.planned(), world.host(), world.previous, None)
    assert corrected.ngram_ids.shape == (5, 0)
    del expected["ngram_ids"]
    check(corrected, expected)


def test_behind_a_prefill_every_sequence_has_emitted_one_token():
    """What a prefill leaves has the width of a decode step's; unfinished prompts have emitted nothing."""
    world = World([True, True, False], 3, [4, 2, 1], emitted=[1, 1, 1], num_strangers=3)
    check(world.correct(), world.true_batch())


# --- rows dealt anew on the device ------------------------------------------------------------------------


def survivals_of(confidences: list[list[float]]) -> Tensor:
    return torch.tensor(confidences, dtype=torch.float32).cumprod(1)


CONFIDENCES = [[0.9, 0.8, 0.7], [0.5, 0.5, 0.5], [0.99, 0.2, 0.9], [0.6, 0.9, 0.9], [0.85, 0.85, 0.85]]


@pytest.mark.parametrize(
    ("total", "seqlens_q"),
    [(4, [1, 1, 1, 1]), (7, [2, 1, 3, 1]), (9, [2, 1, 3, 3]), (12, [3, 1, 4, 4]), (16, [4, 4, 4, 4])],
)
def test_redistribution_of_the_specification(total, seqlens_q):
    remap = int32([2, NO_ROW, 0, 3])
    assert redistribute(total, remap, survivals_of(CONFIDENCES)).tolist() == seqlens_q


def deal_one_by_one(
    num_rows: int, remap: list[int], survivals: list[list[float]], limits: list[int] | None = None
) -> list[int]:
    """Every row beyond the first goes to the sequence whose next draft survives most likely.

    With limits, sequences without a source have theirs from the start.
    """
    width = len(survivals[0]) if survivals else 0
    most = [width + 1] * len(remap) if limits is None else limits
    lengths = [limits[seq] if limits and row < 0 else 1 for seq, row in enumerate(remap)]
    for _ in range(num_rows - sum(lengths)):
        best = None
        for seq, row in enumerate(remap):
            if lengths[seq] < most[seq]:
                value = survivals[row][lengths[seq] - 1] if row >= 0 else 0.0
                if best is None or value > best[0]:
                    best = (value, seq)
        assert best is not None
        lengths[best[1]] += 1
    return lengths


@pytest.mark.parametrize("case", range(40))
def test_redistribution_pops_the_best_next_draft(case):
    """The formulation of which causality is obvious: each pop looks at revealed drafts only."""
    before, count, width = random.randint(1, 8), random.randint(1, 8), random.randint(1, 5)
    levels = random.choice([2, 3, 1000])  # few levels make ties, 1.0 and 0.0 among them
    confidences = [[random.randrange(levels + 1) / levels for _ in range(width)] for _ in range(before)]
    survivals = survivals_of(confidences)
    remap = [random.randrange(NO_ROW, before) for _ in range(count)]
    for num_rows in range(count, count * (width + 1) + 1):
        lengths = redistribute(num_rows, int32(remap), survivals)
        assert lengths.dtype == torch.int32
        assert lengths.tolist() == deal_one_by_one(num_rows, remap, survivals.tolist()), f"{num_rows=}"


@pytest.mark.parametrize("case", range(40))
def test_redistribution_within_limits(case):
    before, count, width = random.randint(1, 8), random.randint(1, 8), random.randint(1, 5)
    levels = random.choice([2, 3, 1000])
    survivals = survivals_of(
        [[random.randrange(levels + 1) / levels for _ in range(width)] for _ in range(before)]
    )
    remap = [random.randrange(NO_ROW, before) for _ in range(count)]
    limits = [random.randint(1, width + 1) for _ in range(count)]
    least = sum(limit if row < 0 else 1 for row, limit in zip(remap, limits))
    for num_rows in range(least, sum(limits) + 1):
        lengths = redistribute(num_rows, int32(remap), survivals, int32(limits)).tolist()
        assert lengths == deal_one_by_one(num_rows, remap, survivals.tolist(), limits), (
            f"{num_rows=} {limits=}"
        )


def test_survivals_are_those_that_the_core_believes_in():
    """Corrected odds; 0 stays 0 and ends a block, 1 is pulled inside of (0, 1)."""
    confidences = torch.tensor([[0.5, 0.8, 0.25], [0.9, 0.0, 0.9], [1.0, 1.0, 1.0]])
    odds = torch.tensor([1.0, 3.0, 0.5])
    found = corrected_survivals(confidences, odds).tolist()
    edge = [0.999, 3 * 0.999 / (0.001 + 3 * 0.999), 0.5 * 0.999 / (0.001 + 0.5 * 0.999)]
    assert found[0] == pytest.approx([0.5, 0.5 * 12 / 13, 0.5 * 12 / 13 / 7], rel=1e-5)
    assert found[1] == pytest.approx([0.9, 0.0, 0.0], rel=1e-5)
    assert found[2] == pytest.approx([edge[0], edge[0] * edge[1], edge[0] * edge[1] * edge[2]], rel=1e-5)


def test_redistribution_ties_go_to_the_lower_index():
    half = torch.full((3, 2), 0.5)
    assert redistribute(5, int32([0, 1, 2]), half).tolist() == [3, 1, 1]
    assert redistribute(6, int32([0, 1, 2]), half).tolist() == [3, 2, 1]


@pytest.mark.parametrize("case", range(40))
def test_dealt_rows_are_corrected_as_if_planned_so(case):
    """Only sequences of the step before take part: the host has planned the others exactly."""
    count, k = random.randint(1, 6), random.randint(1, 5)
    world = World([True] * count, k, [random.randint(1, k + 1) for _ in range(count)])
    total = sum(world.seqlens_q)
    rows = torch.rand(int(world.previous.num_emitted.shape[0]), k).cumprod(1)
    seqlens_q = redistribute(total, int32(world.remap), rows)
    assert int(seqlens_q.sum()) == total and int(seqlens_q.min()) >= 1 and int(seqlens_q.max()) <= k + 1
    dealt = with_seqlens_q(world.planned(), seqlens_q)
    ends = seqlens_q.cumsum(0).tolist()
    assert dealt.cu_seqlens_q.tolist() == [0, *ends]
    check(world.correct(dealt), world.true_batch(seqlens_q.tolist()))


@pytest.mark.parametrize("case", range(40))
def test_sequences_that_the_host_knows_keep_their_rows(case):
    """Rows are dealt among the others, and all are corrected as if planned so."""
    count, k = random.randint(1, 6), random.randint(1, 5)
    matched = [random.random() < 0.6 for _ in range(count)]
    world = World(matched, k, [random.randint(1, k + 1) for _ in range(count)])
    limits = [random.randint(rows, k + 1) if m else rows for rows, m in zip(world.seqlens_q, matched)]
    previous = dataclasses.replace(
        world.previous, confidences=torch.rand(int(world.previous.num_emitted.shape[0]), k)
    )
    remap = dataclasses.replace(world.host(), limits=int32(limits), confidence_odds=torch.rand(k) + 0.5)
    dealt, rows = deal(world.planned(), remap, previous)
    seqlens_q = dealt.cu_seqlens_q.diff().tolist()
    assert rows.tolist() == seqlens_q
    assert sum(seqlens_q) == sum(world.seqlens_q)
    assert all(a == b or m for a, b, m in zip(seqlens_q, world.seqlens_q, matched))
    assert all(a <= b for a, b in zip(seqlens_q, limits))
    check(world.correct(dealt), world.true_batch(seqlens_q))


def test_dealing_the_planned_rows_changes_nothing_that_counts():
    world = World([True, True, True], 3, [2, 4, 1])
    dealt = with_seqlens_q(world.planned(), int32(world.seqlens_q))
    for name in ("cu_seqlens_q", "row_seq", "seqlens_k", "total_lens", "positions"):
        assert torch.equal(getattr(dealt, name), getattr(world.planned(), name)), name
    check(world.correct(dealt), world.true_batch())
