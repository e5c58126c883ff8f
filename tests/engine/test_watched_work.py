"""Work that nobody waits for: its failure is seen once, whenever it ends."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import pytest

from deepinfer.engine.executor import WatchedWork


class EndsWhileLookedAt(Future[Any]):
    """Fails right after it was seen running."""

    def done(self) -> bool:
        was_done = super().done()
        if not was_done:
            self.set_exception(OSError("late"))
        return was_done


def ended(error: Exception | None = None) -> Future[Any]:
    work: Future[Any] = Future()
    work.set_exception(error) if error else work.set_result(None)
    return work


def test_what_ends_between_two_looks_is_not_lost() -> None:
    watched = WatchedWork()
    watched.add(EndsWhileLookedAt())
    watched.check()
    with pytest.raises(OSError, match="late"):
        watched.check()
    watched.check()


def test_each_failure_is_raised_once_and_running_work_stays() -> None:
    watched, running = WatchedWork(), Future[Any]()
    for work in (ended(), running, ended(OSError("first")), ended(ValueError("second"))):
        watched.add(work)
    with pytest.raises(OSError, match="first"):
        watched.check()
    watched.check()  # one failure ends the step for all of them
    running.set_exception(ValueError("third"))
    with pytest.raises(ValueError, match="third"):
        watched.check()
    watched.add(ended(OSError("fourth")))
    watched.clear()
    watched.check()
