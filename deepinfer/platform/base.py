"""What the engine asks of a device that works through a queue while the host goes on."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor

from deepinfer.utils.host_memory import HostRing


class Mark(Protocol):
    """A place in a queue, with the time at which the device came there."""

    def record(self) -> None:
        """Set the mark behind everything queued so far."""

    def query(self) -> bool:
        """Whether the device has come there."""

    def synchronize(self) -> None:
        """Wait until it has."""

    def elapsed_time(self, end: Mark) -> float:
        """Milliseconds from here to a later mark; both have been reached."""


class DeviceQueue(Protocol):
    """One device's queue of work and a second one for copies to the host."""

    device: torch.device

    def launching(self) -> AbstractContextManager[None]:
        """What torch launches inside goes to the queue; a wait for the device is an error there."""

    def waiting(self) -> AbstractContextManager[None]:
        """Inside `launching`: waits are meant."""

    def host_ring(self) -> HostRing:
        """Buffers that copies to the device start in."""

    def capture(self) -> Capture:
        """What makes graphs of its launches."""

    def mark(self) -> Mark:
        """A mark of the queue, not set yet."""

    def fetch(self, tensors: list[Tensor]) -> tuple[list[Tensor], Mark]:
        """Start copies to the host, behind what is queued now and beside what comes then.

        Returns:
            The copies, to be read when the mark is reached.
        """

    def hold_for_fetches(self) -> None:
        """What is queued from here on waits until the copies that were started have read their sources."""

    def drain(self) -> None:
        """Wait until everything launched on the device has run, also beside the queue."""

    def used_bytes(self) -> int:
        """Memory of the device that torch holds, for what lives and for graphs; all else is given back."""


class GraphMemoryError(RuntimeError):
    """A graph did not fit into the device's memory."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"out of memory while capturing the graph of {name}: lower gpu_memory_utilization or "
            "max_num_seqs, set DEEPINFER_CUDAGRAPH_BATCH_SIZE_INTERVAL or "
            "DEEPINFER_DFLASH_CUDAGRAPH_BATCH_SIZE_INTERVAL for fewer sizes, or DEEPINFER_ENFORCE_EAGER=1 "
            "for none"
        )


class Capture(Protocol):
    """Makes graphs on a device."""

    def __call__(self, work: Callable[[], None], name: str) -> Callable[[], None]:
        """Run work once, then capture it.

        Args:
            work: launches of fixed shapes, which read and write at fixed addresses.
            name: what it is, for errors.

        Returns:
            What replays it, as a part of the queue.

        Raises:
            GraphMemoryError: the device's memory does not suffice.
        """
