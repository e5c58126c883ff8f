"""Timers: wall time of the host by named section."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager


class Timers:
    """Adds up the time spent in named sections of a step.

    Attributes:
        seconds: total by section.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def timed(self, section: str) -> Iterator[None]:
        """Add the block's wall time to a section."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[section] += time.perf_counter() - start
