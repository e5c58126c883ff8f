"""Frames: how the engine and its grammar builder talk over pipes. A header as JSON, then plain bytes."""

from __future__ import annotations

import json
import os
import struct
from typing import Any

_LENGTHS = struct.Struct("<IQ")  # of the header and of the bytes

Frame = tuple[dict[str, Any], bytes]


def frame_bytes(header: dict[str, Any], data: bytes = b"") -> bytes:
    """A frame."""
    text = json.dumps(header).encode()
    return _LENGTHS.pack(len(text), len(data)) + text + data


def write_frame(fd: int, header: dict[str, Any], data: bytes = b"") -> None:
    """Write a whole frame to a blocking pipe."""
    view = memoryview(frame_bytes(header, data))
    while view:
        view = view[os.write(fd, view) :]


class FrameReader:
    """Frames out of the bytes of a pipe, in whatever pieces these come."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    @property
    def num_bytes(self) -> int:
        """Bytes of frames that are not complete."""
        return len(self._buffer)

    def feed(self, data: bytes) -> list[Frame]:
        """Add bytes; returns the frames that they complete."""
        self._buffer += data
        frames = []
        while len(self._buffer) >= _LENGTHS.size:
            header_size, data_size = _LENGTHS.unpack_from(self._buffer)
            start = _LENGTHS.size + header_size
            if len(self._buffer) < start + data_size:
                break
            header = json.loads(self._buffer[_LENGTHS.size : start])
            frames.append((header, bytes(self._buffer[start : start + data_size])))
            del self._buffer[: start + data_size]
        return frames
