"""Timers: time by named section of a step, of the host and of a device that works through a queue."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol


class TimeMark(Protocol):
    """A place in a device's queue, with the time at which the device came there."""

    def record(self) -> None:
        """Set the mark behind everything queued so far."""

    def query(self) -> bool:
        """Whether the device has come there."""

    def elapsed_time(self, end: TimeMark) -> float:
        """Milliseconds from here to a later mark."""


class SectionTimers(Protocol):
    """Adds up the time spent in named sections."""

    @property
    def seconds(self) -> Mapping[str, float]:
        """Total by section."""

    def timed(self, section: str) -> AbstractContextManager[None]:
        """Add the block's time to a section."""

    def clear(self) -> None:
        """Start again from zero."""


class Timers:
    """Wall time of the host.

    Attributes:
        seconds: total by section.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    def timed(self, section: str) -> _Timed:
        """Add the block's wall time to a section."""
        return _Timed(self.seconds, section)

    def clear(self) -> None:
        """Start again from zero."""
        self.seconds.clear()


class _Timed:
    """Adds a block's wall time to a section; a class, because a step enters thirty of them."""

    __slots__ = ("_seconds", "_section", "_start")

    def __init__(self, seconds: dict[str, float], section: str) -> None:
        self._seconds = seconds
        self._section = section

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        self._seconds[self._section] += time.perf_counter() - self._start


class QueueTimers:
    """Time of a device between marks in its queue, added up once it has come there.

    Args:
        new_mark: makes a mark.
    """

    def __init__(self, new_mark: Callable[[], TimeMark]) -> None:
        self._new_mark = new_mark
        self._free: list[TimeMark] = []
        self._open: deque[tuple[str, TimeMark, TimeMark]] = deque()
        self._seconds: dict[str, float] = defaultdict(float)

    @property
    def seconds(self) -> Mapping[str, float]:
        """Total by section, of what has ended."""
        while self._open and self._open[0][2].query():
            section, start, end = self._open.popleft()
            self._seconds[section] += 1e-3 * start.elapsed_time(end)
            self._free += (start, end)
        return self._seconds

    @contextmanager
    def timed(self, section: str) -> Iterator[None]:
        """Add the device's time from the block's first launch to the end of its last one."""
        if len(self._free) < 2:
            _ = self.seconds  # marks that the device has passed come free
        start, end = (self._free.pop() if self._free else self._new_mark() for _ in range(2))
        start.record()
        try:
            yield
        finally:
            end.record()
            self._open.append((section, start, end))

    def clear(self) -> None:
        """Start again from zero; what has not ended is not counted."""
        self._open.clear()
        self._seconds.clear()
