"""Speculation, asynchronous scheduling, batching and preemption change no result; what would is noticed.

Cells in which every pair of properties meets; `python -m tests.engine.matrix --all` runs every cell on more.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch

from deepinfer.runtime import model_runner
from deepinfer.runtime.batch_builder import BatchBuilder
from deepinfer.sampling import verify
from tests.engine import matrix
from tests.engine.matrix import Cell


@pytest.fixture(scope="module", autouse=True)
def forget_results() -> Iterator[None]:
    yield
    matrix.plain.cache_clear()


@pytest.mark.parametrize("cell", matrix.covering_cells(), ids=str)
def test_cell(cell: Cell):
    _, wrong = matrix.problems(cell, is_full=False)
    assert not wrong, "\n".join(wrong)


def test_the_covering_cells_are_few_and_cover_every_pair():
    cells = matrix.covering_cells()
    assert len(cells) < len(matrix.every_cell()) / 5

    def pairs(some: list[Cell]) -> set[Any]:
        fields = [field.name for field in dataclasses.fields(Cell)]
        return {(a, getattr(c, a), b, getattr(c, b)) for c in some for a in fields for b in fields}

    assert pairs(cells) == pairs(matrix.every_cell())


# --- mutants: engines with one mistake ---------------------------------------------------------------------


@contextmanager
def changed_sampling(change: Callable[[Any], Any]) -> Iterator[None]:
    """Sampling parameters of decode steps with drafts pass through `change`."""
    original = BatchBuilder.sampling

    def sampling(self: BatchBuilder, plan: Any) -> Any:
        inputs = original(self, plan)
        return inputs if plan.is_prefill or plan.num_draft_rows == 0 else change(inputs)

    with mock.patch.object(BatchBuilder, "sampling", sampling):
        yield


def noise_of_the_next_token() -> Any:
    """Rows that verify draw with the noise of the index behind theirs."""

    def change(inputs: Any) -> Any:
        is_later = torch.ones_like(inputs.token_index)
        is_later[inputs.row_offsets[:-1].long()] = 0
        return dataclasses.replace(inputs, token_index=inputs.token_index + is_later)

    return changed_sampling(change)


def one_draft_accepted_wrongly() -> Any:
    """The first refused draft of a step stands."""
    original = verify.drafts_that_stand

    def test(token_ids: Any, draft_ids: Any, faults: Any) -> Any:
        passed = original(token_ids, draft_ids, faults)
        refused = (~passed & (draft_ids >= 0)).nonzero().flatten()
        passed[refused[:1]] = True
        return passed

    return mock.patch.object(verify, "drafts_that_stand", test)


def one_draft_more_emitted() -> Any:
    """The first sequence of a step keeps one row too many."""
    original = verify.leading_run

    def run(passed: Any, row_offsets: Any) -> Any:
        count = original(passed, row_offsets)
        count[0] = torch.minimum(count[0] + 1, row_offsets[1] - row_offsets[0] - 1)
        return count

    return mock.patch.object(verify, "leading_run", run)


@contextmanager
def changed_batch(change: Callable[[Any], Any]) -> Iterator[None]:
    """Batches of decode steps pass through `change` when the model gets them."""
    original = model_runner.ModelRunner.forward

    def forward(self: Any, *gate: Any) -> None:
        model = self._model

        def changed(batch: Any, *args: Any, **options: Any) -> Any:
            return model.forward(batch if batch.is_prefill else change(batch), *args, **options)

        self._model = mock.Mock(wraps=model, forward=changed, spec=model.spec)
        try:
            original(self, *gate)
        finally:
            self._model = model

    with mock.patch.object(model_runner.ModelRunner, "forward", forward):
        yield


def one_stale_window() -> Any:
    """The last row of a step hashes the n-gram windows of the row before it."""

    def change(batch: Any) -> Any:
        windows = batch.ngram_ids.clone()
        windows[-1] = windows[-2] if batch.num_rows > 1 else 0
        return dataclasses.replace(batch, ngram_ids=windows)

    return changed_batch(change)


def one_early_position() -> Any:
    """The last row of a step stands where the row before it does."""

    def change(batch: Any) -> Any:
        positions = batch.positions.clone()
        positions[-1] -= int(batch.num_rows > 1)
        return dataclasses.replace(batch, positions=positions)

    return changed_batch(change)


def uncorrected_windows() -> Any:
    """A batch planned one step behind keeps the host's n-gram windows."""
    original = model_runner.correct_batch

    def correct(batch: Any, *args: Any, **options: Any) -> Any:
        return dataclasses.replace(original(batch, *args, **options), ngram_ids=batch.ngram_ids)

    return mock.patch.object(model_runner, "correct_batch", correct)


def stale_drafts() -> Any:
    """The device verifies other drafts than the host commits."""
    original = model_runner.correct_batch

    def correct(batch: Any, remap: Any, previous: Any, *args: Any, **options: Any) -> Any:
        shifted = dataclasses.replace(previous, drafts=previous.drafts.roll(1, 1))
        return original(batch, remap, shifted, *args, **options)

    return mock.patch.object(model_runner, "correct_batch", correct)


ALONE = Cell("fixed 5", "T=1", is_async=False, is_batched=False, is_preempted=False)


@pytest.mark.parametrize(
    ("mutant", "is_async"),
    [
        (noise_of_the_next_token, False),
        (one_draft_accepted_wrongly, False),
        (one_draft_accepted_wrongly, True),
        (one_draft_more_emitted, False),
        (one_stale_window, False),
        (one_stale_window, True),
        (one_early_position, False),
        (uncorrected_windows, True),
        (stale_drafts, True),
    ],
)
def test_mutant_is_noticed(mutant, is_async):
    with mutant():
        report = matrix.run(dataclasses.replace(ALONE, is_async=is_async), matrix.short_work(3))
    wrong = report.differences(matrix.plain(ALONE.style, False)[:3])
    assert any("not" in line for line in wrong), wrong


def test_a_cell_that_does_not_do_what_it_says_is_noticed():
    """A drafter that is always right would leave rejection untested."""
    report = matrix.run(ALONE, matrix.short_work(2))
    assert report.unmet() == []
    for change, words in (
        ({"num_accepted": report.num_verified}, "rejected"),
        ({"num_verified": 0, "num_accepted": 0}, "verified"),
        ({"num_cut": 1}, "lengths"),
        ({"num_overlapped": 1}, "overlap"),
        ({"num_preempted": 1}, "preempted"),
        ({"num_evicted": 1}, "pool"),
        ({"max_batch": 2}, "together"),
    ):
        assert any(words in line for line in dataclasses.replace(report, **change).unmet()), words
