"""Entries of a KV store: what a value consists of, and the head that describes and protects it.

An entry is a list of sections, each the bytes of one layer. There are three kinds for a prefix that ends at a
block border, under the same digest:

    block     compressed KV and index keys of the border's last block, a section for each layer that owns some
    state     window rings at the border, a section for each layer: what an exact sequence resumes from
    encoder   of these the encoder's: bounded replay computes the decoder's anew, so they are enough for it

The head comes in front of the sections wherever they are bytes in a row (files):

    0    8  magic
    8    4  version     12  4  bytes of JSON, J     16  4  tokens, T     20  4  sections, S
    24   J  JSON: kind, digest, parent, identity, num_tokens, names and sizes of the sections
         4T  token ids
         32S SHA-256 of each section
         32  SHA-256 of all of the above
         the sections, one behind the other, and nothing behind them
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from deepinfer.kv_transfer.keys import KEY_BYTES

if TYPE_CHECKING:
    from deepinfer.runtime.cache_layout import CacheLayout

BLOCK = "block"
STATE = "state"
ENCODER = "encoder"
MESSAGE = "message"  # what the store connector sends
KINDS = (BLOCK, STATE, ENCODER, MESSAGE)

VERSION = 1
LAYOUT_VERSION = 1  # of record formats and orders that section sizes do not show
MAGIC = b"DIKVENT\x1a"
_FIXED = struct.Struct("<8sIIII")
_DIGEST = 32
_MAX_JSON = 1 << 20
_MAX_TOKENS = 1 << 24
_MAX_SECTIONS = 1 << 14


class DamagedEntryError(Exception):
    """Stored bytes are not what was put: torn, foreign, of another version, or changed."""


@dataclass(frozen=True)
class EntryKey:
    """Names an entry: its kind, and the digest of the prefix (`keys.prefix_keys`)."""

    kind: str
    digest: bytes

    def __post_init__(self) -> None:
        if self.kind not in KINDS or len(self.digest) != KEY_BYTES:
            raise ValueError(
                f"a key needs a kind of {', '.join(KINDS)} and {KEY_BYTES} bytes; got {self.kind!r}, "
                f"{len(self.digest)} bytes"
            )

    def __str__(self) -> str:
        return f"{self.digest.hex()}.{self.kind}"


@dataclass(frozen=True)
class EntrySection:
    """One layer's part of an entry.

    Attributes:
        name: the layer and what it is, such as "2.paged".
        layer_id: of the layer that reads it first; sections ascend by it.
        num_bytes: its size.
        offset: where it lies in a block or state slot of the pools.
    """

    name: str
    layer_id: int
    num_bytes: int
    offset: int


@dataclass(frozen=True)
class EntryHeader:
    """All that an entry says of itself. Who asks for one knows what it has to be, to the last token.

    Attributes:
        key: its name.
        parent: key of the block before; the root for the first one.
        identity: `Identity.digest` of the model, layout and arithmetic.
        num_tokens: tokens of the prefix.
        token_ids: int32 little-endian: of the block, or for a state of the whole prefix.
        sections: (name, bytes) of each.
    """

    key: EntryKey
    parent: bytes
    identity: bytes
    num_tokens: int
    token_ids: bytes
    sections: tuple[tuple[str, int], ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of the sections."""
        return sum(size for _, size in self.sections)

    def encode(self, digests: Sequence[bytes]) -> bytes:
        """The head of an entry whose sections have these SHA-256 digests."""
        fields = {
            "digest": self.key.digest.hex(),
            "identity": self.identity.hex(),
            "kind": self.key.kind,
            "num_tokens": self.num_tokens,
            "parent": self.parent.hex(),
            "sections": self.sections,
        }
        text = json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()
        fixed = _FIXED.pack(MAGIC, VERSION, len(text), len(self.token_ids) // 4, len(self.sections))
        head = b"".join((fixed, text, self.token_ids, *digests))
        return head + hashlib.sha256(head).digest()


@dataclass(frozen=True)
class EntryHead:
    """A decoded head: the header, and what is needed to read the sections behind it.

    Attributes:
        header: what the entry says of itself.
        digests: SHA-256 of each section; none where nothing can have happened to the bytes.
        num_bytes: of the head.
    """

    header: EntryHeader
    digests: tuple[bytes, ...]
    num_bytes: int

    @property
    def total_bytes(self) -> int:
        """Bytes of head and sections."""
        return self.num_bytes + self.header.num_bytes


FIXED_BYTES = _FIXED.size


def head_bytes(fixed: bytes) -> int:
    """Size of the head that begins with these `FIXED_BYTES` bytes.

    Raises:
        DamagedEntryError: they begin no head of this version.
    """
    if len(fixed) < FIXED_BYTES:
        raise DamagedEntryError(f"it ends after {len(fixed)} bytes, inside its head")
    magic, version, num_json, num_tokens, num_sections = _FIXED.unpack_from(fixed)
    if magic != MAGIC:
        raise DamagedEntryError("it is no entry of a KV store")
    if version != VERSION:
        raise DamagedEntryError(f"it has version {version}; this program reads version {VERSION}")
    if num_json > _MAX_JSON or num_tokens > _MAX_TOKENS or num_sections > _MAX_SECTIONS:
        raise DamagedEntryError("its head has impossible sizes")
    return FIXED_BYTES + num_json + 4 * num_tokens + _DIGEST * num_sections + _DIGEST


def decode_head(head: bytes) -> EntryHead:
    """The head that `EntryHeader.encode` made.

    Raises:
        DamagedEntryError: it is not one, bit for bit.
    """
    size = head_bytes(head)
    if len(head) != size:
        raise DamagedEntryError(f"its head has {len(head)} bytes of {size}")
    if hashlib.sha256(head[:-_DIGEST]).digest() != head[-_DIGEST:]:
        raise DamagedEntryError("the checksum of its head is wrong")
    _, _, num_json, num_tokens, num_sections = _FIXED.unpack_from(head)
    tokens_at = FIXED_BYTES + num_json
    digests_at = tokens_at + 4 * num_tokens
    try:
        fields = json.loads(head[FIXED_BYTES:tokens_at])
        header = EntryHeader(
            key=EntryKey(fields["kind"], bytes.fromhex(fields["digest"])),
            parent=bytes.fromhex(fields["parent"]),
            identity=bytes.fromhex(fields["identity"]),
            num_tokens=int(fields["num_tokens"]),
            token_ids=head[tokens_at:digests_at],
            sections=tuple((str(name), int(size)) for name, size in fields["sections"]),
        )
    except (ValueError, KeyError, TypeError) as error:
        raise DamagedEntryError(f"its head cannot be read: {error!r}") from error
    if len(header.sections) != num_sections or any(size < 0 for _, size in header.sections):
        raise DamagedEntryError("its head contradicts itself")
    starts = range(digests_at, digests_at + _DIGEST * num_sections, _DIGEST)
    return EntryHead(header, tuple(head[at : at + _DIGEST] for at in starts), size)


def check_header(found: EntryHeader, expected: EntryHeader) -> None:
    """Compare an entry's header with what was asked for.

    Raises:
        DamagedEntryError: naming the first field that differs.
    """
    if found == expected:
        return
    for name in ("key", "identity", "sections", "num_tokens", "parent", "token_ids"):
        if getattr(found, name) != getattr(expected, name):
            raise DamagedEntryError(f"it belongs to something else: {name} differs")


def digests_of(sections: Iterable[bytes | bytearray | memoryview]) -> tuple[bytes, ...]:
    """SHA-256 of each section."""
    return tuple(hashlib.sha256(data).digest() for data in sections)


def check_section(name: str, data: memoryview | bytes, digest: bytes) -> None:
    """Compare a section's bytes with its checksum. Raises DamagedEntryError."""
    if hashlib.sha256(data).digest() != digest:
        raise DamagedEntryError(f"the checksum of section {name} is wrong")


@dataclass(frozen=True)
class EntryLayout:
    """Sections of all kinds of entries, taken from the layout of the pools.

    Attributes:
        block_size: tokens per block.
        block_bytes, slot_bytes: sizes of a block and a slot in the pools, which the sections lie in.
        block: sections of a block.
        state: sections of a state.
        encoder: of these the first ones, the encoder's.
    """

    block_size: int
    block_bytes: int
    slot_bytes: int
    block: tuple[EntrySection, ...]
    state: tuple[EntrySection, ...]
    encoder: tuple[EntrySection, ...]

    @classmethod
    def of(cls, layout: CacheLayout, state_layers: Iterable[int] | None = None) -> EntryLayout:
        """Take the sections from the pools' layout.

        Compression rings are in no entry: at a block border every group has ended.

        Args:
            layout: of the pools.
            state_layers: layers whose window rings are in use; all of them when None.
        """
        wanted = {w.layer_id for w in layout.windows} if state_layers is None else set(state_layers)
        block = tuple(
            EntrySection(
                f"{s.layer_id}.paged",
                s.layer_id,
                s.main_offset + s.entries * s.main_bytes - s.index_offset,
                s.index_offset,
            )
            for s in layout.paged
        )
        state = tuple(
            EntrySection(f"{w.layer_id}.window", w.layer_id, w.num_bytes, w.offset)
            for w in layout.windows
            if w.layer_id in wanted
        )
        encoder = tuple(section for section in state if section.offset < layout.stored_slot_bytes)
        return cls(layout.block_size, layout.block_bytes, layout.slot_bytes, block, state, encoder)

    def sections(self, kind: str) -> tuple[EntrySection, ...]:
        """Sections of an entry of this kind."""
        return {BLOCK: self.block, STATE: self.state, ENCODER: self.encoder}[kind]

    def fingerprint(self) -> str:
        """Version and digest: equal for layouts whose entries can be exchanged."""
        parts = self.block, self.state, self.encoder
        text = json.dumps([[[s.name, s.num_bytes] for s in part] for part in parts])
        return f"{LAYOUT_VERSION}:{hashlib.sha256(text.encode()).hexdigest()}"
