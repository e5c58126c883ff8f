"""Step-time curves that an engine with a draft budget is made to believe in."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

from deepinfer.engine import parts
from deepinfer.runtime.step_time import StepSize, StepTimes
from tests.support.engines import WatchedCore

FAR = 1e6  # ms


def flat(size: StepSize) -> float:
    return FAR


def modest(size: StepSize) -> float:
    """Half of a plain step for each draft of one request, much less in a batch."""
    return FAR * (2 + 0.3 * size.num_tokens)


def steep(size: StepSize) -> float:
    return FAR * size.num_tokens


def without_drafting(size: StepSize) -> float:
    """Proposing drafts takes as long as the step itself."""
    return FAR * size.num_tokens * (2 if size.is_drafted else 1)


CURVES = {"flat": flat, "modest": modest, "steep": steep, "without drafting": without_drafting}


@contextlib.contextmanager
def believed(curve: str) -> Iterator[None]:
    """Engines made meanwhile take a curve for what they would measure."""

    def measured(run: Any, sizes: list[StepSize]) -> StepTimes:
        return StepTimes({size: CURVES[curve](size) for size in sizes})

    with mock.patch.object(parts, "measure", measured):
        yield


class BelievingCore(WatchedCore):
    """Learns nothing from what steps really take."""

    def add_step_time(self, *args: Any, **options: Any) -> None:
        pass
