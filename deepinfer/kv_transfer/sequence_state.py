"""SequenceState: all that another engine needs to go on with a sequence, as one record of plain bytes.

    0    8  magic
    8    4  version     12  4  bytes of JSON, J
    16   J  JSON: fields, and name, dtype, shape and place of each array
         32 SHA-256 of all of the above
         the arrays, each at a multiple of 64 bytes, zeros in between

Nothing in it is code: JSON and raw numbers, every one checked before it is used. The arrays carry no checksum
of their own; a transport over something that can damage them adds it.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from deepinfer.kv_transfer.entry import EntryLayout
from deepinfer.kv_transfer.keys import KEY_BYTES

VERSION = 1
MAGIC = b"DISEQST\x1a"
_FIXED = struct.Struct("<8sII")
_ALIGN = 64
_MAX_JSON = 1 << 26
_MAX_ARRAYS = 256
_DTYPES = {
    "uint8": "|u1",
    "int32": "<i4",
    "int64": "<i8",
    "uint64": "<u8",
    "float32": "<f4",
    "float64": "<f8",
}
_ARRAYS = {
    "token_ids": ("int32", 1),
    "drafts": ("int32", 1),
    "draft_confidences": ("float32", 1),
    "blocks": ("uint8", 2),
    "slot": ("uint8", 1),
}


class SequenceStateError(ValueError):
    """A record is not one, is damaged, or does not fit to this engine; the message says what it is."""


@dataclass(frozen=True)
class SequenceState:
    """A sequence between two steps.

    Attributes:
        identity: `Identity.digest` of the engine that computed it.
        request_id: of the request, in both engines.
        num_prompt: tokens of the prompt.
        num_computed: tokens that have KV; for a running sequence all but the newest.
        token_ids: [n] int32 prompt and outputs, the sampled token last.
        drafts: [k] int32 drafts behind it, not verified yet.
        draft_confidences: [k] float32 estimates of the drafter, or [0].
        sampling: plain values that fix how its tokens are chosen: parameters, the seed, what was counted.
        blocks: [b, block_bytes] uint8 of the paged pool, in order of positions.
        slot: [slot_bytes] uint8 of the state pool.
        extras: further arrays by name, such as log-probabilities so far and scores of ratio drafts.
    """

    identity: bytes
    request_id: str
    num_prompt: int
    num_computed: int
    token_ids: np.ndarray
    drafts: np.ndarray
    draft_confidences: np.ndarray
    sampling: Mapping[str, Any]
    blocks: np.ndarray
    slot: np.ndarray
    extras: Mapping[str, np.ndarray] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, (dtype, dims) in _ARRAYS.items():
            array = getattr(self, name)
            if array.dtype != dtype or array.ndim != dims:
                raise SequenceStateError(
                    f"{name} must be {dtype} with {dims} dimension(s), got {array.dtype} {array.shape}"
                )
        for name, array in self.extras.items():
            if name in _ARRAYS or array.dtype.name not in _DTYPES:
                raise SequenceStateError(f"extra array {name!r} has a reserved name or dtype {array.dtype}")
        n, k = len(self.token_ids), len(self.drafts)
        if len(self.identity) != KEY_BYTES:
            raise SequenceStateError(f"identity has {len(self.identity)} bytes instead of {KEY_BYTES}")
        if not 0 < self.num_prompt <= n or not 0 <= self.num_computed <= n:
            raise SequenceStateError(
                f"{n} tokens cannot have num_prompt={self.num_prompt} and num_computed={self.num_computed}"
            )
        if len(self.draft_confidences) not in (0, k):
            raise SequenceStateError(f"{k} drafts have {len(self.draft_confidences)} confidences")

    def check(self, identity: bytes, layout: EntryLayout) -> None:
        """Whether an engine with this identity and layout can go on with it. Raises SequenceStateError."""
        if self.identity != identity:
            raise SequenceStateError(
                f"request {self.request_id}: its state comes from another model, arithmetic, bounded replay "
                f"or cache layout ({self.identity.hex()[:12]}, this engine is {identity.hex()[:12]})"
            )
        if self.num_computed == len(self.blocks) == self.slot.size == 0:
            return  # it has ended
        if self.slot.size != layout.slot_bytes or self.blocks.shape[1] != layout.block_bytes:
            raise SequenceStateError(
                f"request {self.request_id}: blocks of {self.blocks.shape[1]} and a slot of {self.slot.size} "
                f"bytes; this engine has {layout.block_bytes} and {layout.slot_bytes}"
            )
        needed = -(-self.num_computed // layout.block_size)
        if len(self.blocks) < needed:
            raise SequenceStateError(
                f"request {self.request_id}: {len(self.blocks)} blocks do not hold its {self.num_computed} "
                f"computed tokens, which take {needed}"
            )

    def encode(self) -> list[memoryview]:
        """The record in parts; their concatenation is what `decode` reads. Arrays are not copied."""
        arrays = {name: getattr(self, name) for name in _ARRAYS} | dict(self.extras)
        table, parts, offset = [], [], 0
        for name, array in arrays.items():
            data = np.ascontiguousarray(array, dtype=_DTYPES[array.dtype.name])
            padding = -offset % _ALIGN
            table.append([name, array.dtype.name, list(array.shape), offset + padding])
            parts += [memoryview(bytes(padding)), _bytes_of(data)]
            offset += padding + data.nbytes
        fields = {
            "arrays": table,
            "identity": self.identity.hex(),
            "num_computed": self.num_computed,
            "num_prompt": self.num_prompt,
            "request_id": self.request_id,
            "sampling": dict(self.sampling),
        }
        try:
            text = json.dumps(fields, separators=(",", ":")).encode()
        except TypeError as error:
            raise SequenceStateError(
                f"request {self.request_id}: `sampling` is not plain: {error}"
            ) from error
        head = _FIXED.pack(MAGIC, VERSION, len(text)) + text
        head += hashlib.sha256(head).digest()
        head += bytes(-len(head) % _ALIGN)
        return [part for part in (memoryview(head), *parts) if part.nbytes]

    @classmethod
    def decode(cls, data: bytes | bytearray | memoryview) -> SequenceState:
        """Read a record. Arrays are views of `data`, which has to stay as it is.

        Raises:
            SequenceStateError: it is no record of this version, or not a whole one.
        """
        view = memoryview(data).cast("B")
        fields, start = _decode_head(view)
        try:
            if len(fields["arrays"]) > _MAX_ARRAYS:
                raise ValueError("too many arrays")
            arrays = {name: _array(view[start:], *place) for name, *place in fields["arrays"]}
            known = {name: arrays.pop(name) for name in _ARRAYS}
            return cls(
                identity=bytes.fromhex(fields["identity"]),
                request_id=str(fields["request_id"]),
                num_prompt=int(fields["num_prompt"]),
                num_computed=int(fields["num_computed"]),
                sampling=dict(fields["sampling"]),
                extras=arrays,
                **known,
            )
        except SequenceStateError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise SequenceStateError(f"the state of a sequence cannot be read: {error!r}") from error


def num_bytes(parts: list[memoryview]) -> int:
    """Size of an encoded record."""
    return sum(part.nbytes for part in parts)


def _bytes_of(array: np.ndarray) -> memoryview:
    return memoryview(array.reshape(-1).view(np.uint8))


def _decode_head(view: memoryview) -> tuple[dict[str, Any], int]:
    """Fields of the head, and where the arrays begin."""
    if view.nbytes < _FIXED.size:
        raise SequenceStateError(f"the state of a sequence ends after {view.nbytes} bytes")
    magic, version, num_json = _FIXED.unpack_from(view)
    if magic != MAGIC:
        raise SequenceStateError("this is no state of a sequence")
    if version != VERSION:
        raise SequenceStateError(f"the state has version {version}; this program reads version {VERSION}")
    end = _FIXED.size + num_json
    if num_json > _MAX_JSON or view.nbytes < end + 32:
        raise SequenceStateError("the state of a sequence ends inside its head")
    if hashlib.sha256(view[:end]).digest() != view[end : end + 32]:
        raise SequenceStateError("the checksum of a sequence's state is wrong")
    try:
        fields = json.loads(bytes(view[_FIXED.size : end]))
    except ValueError as error:
        raise SequenceStateError(f"the head of a sequence's state cannot be read: {error}") from error
    if not isinstance(fields, dict):
        raise SequenceStateError("the head of a sequence's state holds no fields")
    start = end + 32
    return fields, start + -start % _ALIGN


def _array(data: memoryview, dtype: str, shape: list[int], offset: int) -> np.ndarray:
    """A view of an array. Raises ValueError, KeyError or TypeError when it does not lie in the data."""
    kind = np.dtype(_DTYPES[dtype])
    if not all(isinstance(size, int) and size >= 0 for size in shape) or len(shape) > 4 or offset < 0:
        raise ValueError(f"impossible {shape=} {offset=}")
    count = math.prod(shape)
    if offset + count * kind.itemsize > data.nbytes:
        raise ValueError(f"an array ends at {offset + count * kind.itemsize} of {data.nbytes} bytes")
    return np.frombuffer(data, kind, count, offset).reshape(shape)
