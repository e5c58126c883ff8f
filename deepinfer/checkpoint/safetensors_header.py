"""Parses and proves the header of one safetensors file.

8 bytes      little-endian unsigned header length N
N bytes      JSON: name -> {"dtype", "shape", "data_offsets": [begin, end]}, optionally "__metadata__"
the rest     data; offsets count from byte 8 + N and cover it without a gap or an overlap
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepinfer.checkpoint.errors import CheckpointError

DTYPE_BYTES = {
    "BF16": 2,
    "F16": 2,
    "F32": 4,
    "F8_E4M3": 1,
    "F8_E8M0": 1,
    "I8": 1,
    "U8": 1,
    "I32": 4,
    "I64": 8,
}
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies and what it is.

    Attributes:
        dtype: the header's word, for example "BF16".
        shape: as in the header.
        file: the shard.
        offset: first byte of the data, counted from the start of the file.
        nbytes: bytes of data.
    """

    dtype: str
    shape: tuple[int, ...]
    file: Path
    offset: int
    nbytes: int


def read_header(path: Path) -> dict[str, TensorInfo]:
    """The tensors of one file, by their name in the file.

    Raises:
        CheckpointError: the file is too short, its header is not valid, or an entry does not fit the data.
    """
    try:
        size = os.path.getsize(path)
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > size - 8 or length > _MAX_HEADER_BYTES:
                raise CheckpointError(
                    f"truncated or not safetensors: the header length says {length} bytes, "
                    f"the file has {max(size - 8, 0)} after it",
                    file=str(path),
                )
            text = file.read(length)
    except OSError as error:
        raise CheckpointError(f"cannot be read: {error.strerror or error}", file=str(path)) from error
    entries = _parse(text, path)
    data_start, data_bytes = 8 + length, size - 8 - length
    tensors = {
        name: _tensor_info(name, entry, path, data_start, data_bytes) for name, entry in entries.items()
    }
    _check_layout(tensors, path, data_start, size)
    return tensors


def _parse(text: bytes, path: Path) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        entries: dict[str, Any] = {}
        for key, value in pairs:
            if key in entries:
                raise CheckpointError("stands twice in the header", tensor=key, file=str(path))
            entries[key] = value
        return entries

    try:
        entries = json.loads(text.decode("utf-8"), object_pairs_hook=unique)
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise CheckpointError(f"the header is not valid JSON: {error}", file=str(path)) from error
    if not isinstance(entries, dict):
        raise CheckpointError("the header is not a JSON object", file=str(path))
    entries.pop("__metadata__", None)
    return entries


def _tensor_info(name: str, entry: Any, path: Path, data_start: int, data_bytes: int) -> TensorInfo:
    """One header entry, proved against the size of the data."""

    def fail(message: str) -> CheckpointError:
        return CheckpointError(message, tensor=name, file=str(path))

    if not isinstance(entry, dict):
        raise fail(f"the header entry is not an object: {entry!r}")
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if dtype not in DTYPE_BYTES:
        raise fail(f"dtype {dtype!r} is not supported; supported: {', '.join(DTYPE_BYTES)}")
    if not isinstance(shape, list) or any(type(n) is not int or n < 0 for n in shape):
        raise fail(f"the header's shape is not a list of sizes: {shape!r}")
    if not isinstance(offsets, list) or len(offsets) != 2 or any(type(n) is not int for n in offsets):
        raise fail(f"the header's data_offsets are not two integers: {offsets!r}")
    begin, end = offsets
    if not 0 <= begin <= end:
        raise fail(f"data_offsets {offsets} out of range")
    if end > data_bytes:
        raise fail(
            f"data_offsets {offsets} end beyond the file's {data_bytes} data bytes: truncated or out of range"
        )
    nbytes = math.prod(shape) * DTYPE_BYTES[dtype]
    if end - begin != nbytes:
        raise fail(f"data_offsets {offsets} span {end - begin} bytes, {dtype} {shape} needs {nbytes}")
    return TensorInfo(dtype, tuple(shape), path, data_start + begin, nbytes)


def _check_layout(tensors: dict[str, TensorInfo], path: Path, data_start: int, size: int) -> None:
    """The data of all tensors must follow one another and reach the end of the file."""
    expected = data_start
    for name, info in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        if info.offset != expected:
            fault = "overlaps the tensor before it" if info.offset < expected else "leaves a gap before it"
            begin = info.offset - data_start
            raise CheckpointError(
                f"data_offsets out of range: begins at {begin}, expected {expected - data_start}; {fault}",
                tensor=name,
                file=str(path),
            )
        expected += info.nbytes
    if expected != size:
        raise CheckpointError(f"{size - expected} bytes after the last tensor belong to none", file=str(path))
