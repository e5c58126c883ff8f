"""Host memory that copies to a device start in, so that neither the host nor the device waits for the other.

A copy from page-locked memory runs while the host goes on; its source may be written again once it has ended.
On a CPU there is nothing to copy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Protocol

import torch
from torch import Tensor

_DTYPES = {"int32": torch.int32, "int64": torch.int64, "float32": torch.float32}

# (name, dtype, shape, byte offset) of an array in a buffer, as the C++ core describes it.
LayoutEntry = tuple[str, str, tuple[int, ...], int]


def split(buffer: Tensor, entries: Iterable[LayoutEntry]) -> dict[str, Tensor]:
    """Views of a byte buffer by name."""
    views = {}
    for name, dtype, shape, offset in entries:
        kind = _DTYPES[dtype]
        num_bytes = kind.itemsize * math.prod(shape)
        views[name] = buffer[offset : offset + num_bytes].view(kind).view(shape)
    return views


class CopyMark(Protocol):
    """Marks a place in a device's queue."""

    def record(self) -> None:
        """Set the mark behind everything queued so far."""

    def query(self) -> bool:
        """Whether the device has come there."""

    def synchronize(self) -> None:
        """Wait until it has."""


class HostRing:
    """Some buffers that are filled in turn; one is filled again only when the copy out of it has ended.

    Args:
        count: of buffers.
        allocate: bytes -> uint8 [bytes], page-locked.
        new_mark: makes a mark in the queue of the copies.
        least_bytes: of a buffer; page-locked memory is slow to get, so it should seldom have to grow.

    Attributes:
        num_waits: times that the host came round before a copy had ended.
    """

    def __init__(
        self,
        count: int,
        allocate: Callable[[int], Tensor],
        new_mark: Callable[[], CopyMark],
        least_bytes: int = 1,
    ) -> None:
        self._allocate = allocate
        self._least_bytes = least_bytes
        self._buffers: list[Tensor | None] = [None] * count
        self._marks = [new_mark() for _ in range(count)]
        self._is_used = [False] * count
        self._next = 0
        self.num_waits = 0

    def take(self, num_bytes: int) -> Tensor:
        """The next buffer's first bytes, uint8 [num_bytes], to be filled and copied; then call `copied`."""
        place = self._next
        if self._is_used[place]:
            if not self._marks[place].query():
                self.num_waits += 1
                self._marks[place].synchronize()
            self._is_used[place] = False
        buffer = self._buffers[place]
        if buffer is None or buffer.shape[0] < num_bytes:
            buffer = self._buffers[place] = self._allocate(
                1 << (max(num_bytes, self._least_bytes) - 1).bit_length()
            )
        return buffer[:num_bytes]

    def copied(self) -> None:
        """The copy out of the newest buffer is queued."""
        self._marks[self._next].record()
        self._is_used[self._next] = True
        self._next = (self._next + 1) % len(self._buffers)
