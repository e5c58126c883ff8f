"""Keys of stored prefixes: SHA-256 chained over blocks of tokens, starting from what the bytes depend on.

    root    = sha256(tag | canonical JSON of the Identity)
    key[i]  = sha256(key[i - 1] | tokens of block i | images that reach into block i)

Equal keys mean equal models, layouts and tokens up to the end of a block, so what was computed for one
sequence serves every other one.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

import numpy as np

KEY_BYTES = 32
_ROOT_TAG = b"deepinfer.kv.root\x01"
_BLOCK_TAG = b"deepinfer.kv.block\x01"


@dataclass(frozen=True)
class Identity:
    """What stored bytes depend on besides tokens. Two engines share state only if all of it is equal.

    Attributes:
        model: architecture, configuration and weights, as a digest of them.
        arithmetic: how values are rounded; with everything that the bits of a build depend on.
        layout: version and digest of the cache layout (`EntryLayout.fingerprint`).
        block_size: tokens per block.
    """

    model: str
    arithmetic: str
    layout: str
    block_size: int

    def digest(self) -> bytes:
        """32 bytes that stand for the whole of it; the root of every chain of keys."""
        text = json.dumps(asdict(self), sort_keys=True, separators=(",", ":"), ensure_ascii=True)
        return hashlib.sha256(_ROOT_TAG + text.encode()).digest()


@dataclass(frozen=True)
class ImageSpan:
    """Tokens that stand for an image; their ids say nothing about it, its content does.

    Attributes:
        start: position of its first token in the sequence.
        length: tokens.
        content: 32 bytes, SHA-256 of what the model sees.
    """

    start: int
    length: int
    content: bytes

    def __post_init__(self) -> None:
        if self.start < 0 or self.length < 1 or len(self.content) != KEY_BYTES:
            raise ValueError(
                f"an image span needs start >= 0, length >= 1 and a digest of {KEY_BYTES} bytes; got "
                f"start={self.start}, length={self.length}, {len(self.content)} bytes"
            )


def block_key(parent: bytes, token_ids: np.ndarray, images: Sequence[ImageSpan] = ()) -> bytes:
    """The key of a block behind the block (or root) `parent`.

    Args:
        parent: key of what precedes it.
        token_ids: [block_size] of the block.
        images: spans that reach into the block, ascending.
    """
    tokens = np.ascontiguousarray(token_ids, dtype="<i4").tobytes()
    digest = hashlib.sha256(_BLOCK_TAG + parent + struct.pack("<II", len(tokens) // 4, len(images)) + tokens)
    for span in images:
        digest.update(struct.pack("<qq", span.start, span.length) + span.content)
    return digest.digest()


def prefix_keys(
    identity: Identity, token_ids: np.ndarray, images: Sequence[ImageSpan] = ()
) -> Iterator[bytes]:
    """Keys of all full blocks of a sequence, in order, each computed when it is asked for.

    Args:
        identity: what the bytes depend on.
        token_ids: [n] int32; tokens behind the last full block are ignored.
        images: spans of the sequence, ascending.
    """
    size = identity.block_size
    tokens = np.ascontiguousarray(token_ids, dtype="<i4")
    key = identity.digest()
    for start in range(0, len(tokens) - size + 1, size):
        inside = [s for s in images if s.start < start + size and s.start + s.length > start]
        key = block_key(key, tokens[start : start + size], inside)
        yield key
