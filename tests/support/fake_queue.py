"""FakeQueue: the CPU in the place of a device that works through a queue, so that its code path is tested.

Launches run at once. "Graphs" are functions that run again: with a replay the code of a captured step reads
the same buffers as on a device, padding included.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from deepinfer.engine import parts
from deepinfer.utils.host_memory import HostRing

CPU = torch.device("cpu")


class FakeMark:
    """A mark that is reached when it is set."""

    def __init__(self) -> None:
        self.time = 0.0

    def record(self) -> None:
        self.time = time.perf_counter()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: FakeMark) -> float:
        return 1e3 * (end.time - self.time)


class FakeQueue:
    """A `DeviceQueue` on a CPU.

    Attributes:
        captured: names of the graphs, in order.
        num_replays: of all graphs.
        num_waits: entered `waiting`.
    """

    def __init__(self) -> None:
        self.device = CPU
        self.captured: list[str] = []
        self.num_replays = self.num_waits = 0
        self.is_launching = False

    @contextmanager
    def launching(self) -> Iterator[None]:
        self.is_launching = True
        yield
        self.is_launching = False

    @contextmanager
    def waiting(self) -> Iterator[None]:
        assert self.is_launching
        self.num_waits += 1
        yield

    def mark(self) -> FakeMark:
        return FakeMark()

    def host_ring(self) -> HostRing:
        return HostRing(8, lambda size: torch.empty(size, dtype=torch.uint8), FakeMark)

    def fetch(self, tensors: list[Tensor]) -> tuple[list[Tensor], FakeMark]:
        return [tensor.clone() for tensor in tensors], FakeMark()

    def hold_for_fetches(self) -> None:
        pass

    def drain(self) -> None:
        pass

    def used_bytes(self) -> int:
        return 0

    def capture(self) -> Callable[[Callable[[], None], str], Callable[[], None]]:
        def capture(work: Callable[[], None], name: str) -> Callable[[], None]:
            def replay() -> None:
                assert self.is_launching
                self.num_replays += 1
                work()

            self.captured.append(name)
            work()
            work()  # as the capture itself runs it
            return replay

        return capture


def fake_device(queue: FakeQueue) -> Any:
    """While it is entered, engines run on `queue`."""
    return mock.patch.object(parts, "open_device", return_value=(CPU, queue))
