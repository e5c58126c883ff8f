"""Host memory that copies to a device start in, so that neither the host nor the device waits for the other.

A copy from page-locked memory runs while the host goes on; its source may be written again once it has ended.
On a CPU there is nothing to copy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

_DTYPES = {"int32": torch.int32, "int64": torch.int64, "float32": torch.float32}

# (name, dtype, shape, byte offset) of an array in a buffer, as the C++ core describes it.
LayoutEntry = tuple[str, str, tuple[int, ...], int]


@dataclass(frozen=True)
class PackedArrays:
    """A step's arrays as they came: in one buffer.

    Attributes:
        words: int32 [n], the buffer on the device.
        layout: what lies where.
    """

    words: Tensor
    layout: tuple[LayoutEntry, ...]


def split(buffer: Tensor, entries: Iterable[LayoutEntry]) -> dict[str, Tensor]:
    """Views of a byte buffer by name; one operator of torch for each."""
    bases: dict[str, Tensor] = {}
    views = {}
    for name, dtype, shape, offset in entries:
        base = bases.get(dtype)
        if base is None:
            kind = _DTYPES[dtype]
            base = bases[dtype] = buffer[: buffer.shape[0] // kind.itemsize * kind.itemsize].view(kind)
        strides = (1,) if len(shape) == 1 else (shape[1], 1)
        assert len(shape) <= 2, f"{name=} {shape=}"
        views[name] = base.as_strided(shape, strides, base.storage_offset() + offset // base.itemsize)
    return views


class HostArrays(Mapping[str, np.ndarray]):
    """The same of a byte buffer on the host, each made when it is first asked for: a step reads few of them.

    Args:
        buffer: uint8.
        entries: what lies where.
    """

    def __init__(self, buffer: np.ndarray, entries: Iterable[LayoutEntry]) -> None:
        self._buffer = buffer
        self._entries = {entry[0]: entry for entry in entries}
        self._made: dict[str, np.ndarray] = {}

    def __getitem__(self, name: str) -> np.ndarray:
        array = self._made.get(name)
        if array is None:
            _, dtype, shape, offset = self._entries[name]
            num_bytes = np.dtype(dtype).itemsize * math.prod(shape)
            array = self._buffer[offset : offset + num_bytes].view(dtype).reshape(shape)
            self._made[name] = array
        return array

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


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
