"""Keys: an independent computation gives the same ones, and everything that bytes depend on changes them."""

from __future__ import annotations

import hashlib
import json
import struct
from dataclasses import asdict, replace

import numpy as np
import pytest

from deepinfer.kv_transfer.keys import Identity, ImageSpan, prefix_keys
from deepinfer.kv_transfer.prefix import PrefixChain
from tests.kv_transfer.toys import BLOCK_SIZE, toy_identity, toy_layout

TOKENS = np.arange(100, 100 + 5 * BLOCK_SIZE + 3, dtype=np.int32)


def keys(identity: Identity | None = None, tokens: np.ndarray = TOKENS, images=()) -> list[bytes]:
    return list(prefix_keys(identity or toy_identity(), tokens, images))


def test_chain_against_hashlib() -> None:
    """Written from the description, byte by byte."""
    identity = toy_identity()
    images = [ImageSpan(2, 4, b"x" * 32), ImageSpan(9, 1, b"y" * 32)]
    fields = asdict(identity)
    text = "{" + ",".join(f"{json.dumps(name)}:{json.dumps(fields[name])}" for name in sorted(fields)) + "}"
    expected, parent = [], hashlib.sha256(b"deepinfer.kv.root\x01" + text.encode("ascii")).digest()
    assert parent == identity.digest()
    for block in range(5):
        ids = TOKENS[block * 4 : block * 4 + 4].tolist()
        inside = {0: images[:1], 1: images[:1], 2: images[1:]}.get(block, [])
        message = b"deepinfer.kv.block\x01" + parent
        message += (4).to_bytes(4, "little") + len(inside).to_bytes(4, "little")
        message += b"".join(token.to_bytes(4, "little", signed=True) for token in ids)
        for span in inside:
            message += struct.pack("<q", span.start) + struct.pack("<q", span.length) + span.content
        parent = hashlib.sha256(message).digest()
        expected.append(parent)
    assert keys(images=images) == expected


def test_every_token_changes_its_block_and_all_behind() -> None:
    base = keys()
    for place in range(len(TOKENS)):
        changed = TOKENS.copy()
        changed[place] += 1
        first = place // BLOCK_SIZE
        other = keys(tokens=changed)
        assert other[:first] == base[:first]
        assert not set(other[first:]) & set(base[first:])


@pytest.mark.parametrize("name", ["model", "arithmetic", "layout"])
def test_identity_changes_every_key(name: str) -> None:
    other = keys(replace(toy_identity(), **{name: "another"}))
    assert not set(other) & set(keys())


def test_block_size_is_part_of_the_root() -> None:
    assert replace(toy_identity(), block_size=8).digest() != toy_identity().digest()


def test_images_are_known_by_content_and_place() -> None:
    span = ImageSpan(5, 2, b"x" * 32)
    base = keys(images=[span])
    assert base[0] == keys()[0] and base[1] != keys()[1]
    for other in (replace(span, content=b"y" * 32), replace(span, start=6), replace(span, length=1)):
        assert keys(images=[other])[1:] != base[1:]
        assert not set(keys(images=[other])[1:]) & set(base[1:])


@pytest.mark.parametrize("n", [0, 1, 3, 4, 5, 7, 8, 9])
def test_only_full_blocks_have_keys(n: int) -> None:
    assert keys(tokens=TOKENS[:n]) == keys()[: n // BLOCK_SIZE]
    assert keys(tokens=TOKENS[:n].astype(np.int64)) == keys()[: n // BLOCK_SIZE]


def test_chain_names_blocks_and_states() -> None:
    """A block names its own tokens, a state all before it; both the key of the block before."""
    tokens = TOKENS.copy()
    chain = PrefixChain(toy_identity(), toy_layout(), tokens)
    tokens[:] = 0  # the caller's array is the caller's
    assert chain.num_blocks == 5
    assert chain.block(3).key.digest == chain.state(4).key.digest == keys()[3]
    assert chain.block(0).parent == toy_identity().digest() and chain.block(3).parent == keys()[2]
    assert chain.block(3).token_ids == TOKENS[12:16].astype("<i4").tobytes()
    assert chain.state(4).token_ids == TOKENS[:16].astype("<i4").tobytes()
    assert chain.block(3).num_tokens == 16 and chain.block(3).key != chain.state(4).key


@pytest.mark.parametrize("span", [(-1, 1, 32), (0, 0, 32), (0, 1, 31)])
def test_bad_spans(span: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="image span"):
        ImageSpan(span[0], span[1], bytes(span[2]))
