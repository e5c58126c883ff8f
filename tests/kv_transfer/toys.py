"""Small layouts, entries and states, filled with numbers that depend on everything that names them."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

from deepinfer.kv_transfer.entry import EntryHeader, EntryKey, EntryLayout, EntrySection
from deepinfer.kv_transfer.keys import Identity
from deepinfer.kv_transfer.prefix import PrefixStore
from deepinfer.kv_transfer.sequence_state import SequenceState
from deepinfer.kv_transfer.store import KVStore, StoredEntry

BLOCK_SIZE = 4


def toy_layout() -> EntryLayout:
    """Layers 0 ... 3 with windows, 1 and 3 with paged sections; gaps between and behind the sections."""
    block = (EntrySection("1.paged", 1, 40, 0), EntrySection("3.paged", 3, 96, 64))
    state = tuple(EntrySection(f"{layer}.window", layer, 33 + layer, 64 * layer) for layer in range(4))
    return EntryLayout(
        BLOCK_SIZE, block_bytes=192, slot_bytes=320, block=block, state=state, encoder=state[:2]
    )


def toy_identity(**changes: str) -> Identity:
    fields: dict[str, Any] = {"model": "toy", "arithmetic": "float32", "layout": toy_layout().fingerprint()}
    return Identity(**{**fields, **changes}, block_size=BLOCK_SIZE)


def toy_prefixes(store: KVStore, **changes: str) -> PrefixStore:
    return PrefixStore(store, toy_identity(**changes), toy_layout())


def noise(*names: object, size: int) -> np.ndarray:
    """Bytes that are a function of their names."""
    seed = hashlib.sha256(repr(names).encode()).digest()
    return np.random.default_rng(list(seed)).integers(0, 256, size, np.uint8)


def entry(number: int, size: int = 100, kind: str = "block") -> tuple[EntryHeader, list[bytes]]:
    """Entry `number` with three sections, of `size` bytes in all; one of them is empty."""
    digest = hashlib.sha256(b"entry %d" % number).digest()
    data = noise("entry", number, size=size).tobytes()
    cut = size // 3
    header = EntryHeader(
        key=EntryKey(kind, digest),
        parent=hashlib.sha256(b"parent").digest(),
        identity=hashlib.sha256(b"identity").digest(),
        num_tokens=8,
        token_ids=np.arange(number, number + 4, dtype="<i4").tobytes(),
        sections=(("a", cut), ("nothing", 0), ("b", size - cut)),
    )
    return header, [data[:cut], b"", data[cut:]]


def contents(found: StoredEntry) -> list[bytes]:
    """All sections of an entry."""
    with found:
        return [bytes(found.read(place)) for place in range(len(found.header.sections))]


def toy_state(number: int = 0, num_tokens: int = 11, num_blocks: int = 3, **changes: Any) -> SequenceState:
    """The state of a sequence with three drafts and some extra arrays."""
    layout = toy_layout()
    fields: dict[str, Any] = {
        "identity": toy_identity().digest(),
        "request_id": f"request {number}",
        "num_prompt": num_tokens - 1,
        "num_computed": num_tokens - 1,
        "token_ids": np.arange(number, number + num_tokens, dtype=np.int32),
        "drafts": np.array([5, 6, 7], np.int32),
        "draft_confidences": np.array([0.5, 0.25, 0.125], np.float32),
        "sampling": {"temperature": 0.7, "seed": 2**63 + 1, "stop": ["a", "b"], "top_k": None},
        "blocks": noise("blocks", number, size=num_blocks * layout.block_bytes).reshape(num_blocks, -1),
        "slot": noise("slot", number, size=layout.slot_bytes),
        "extras": {
            "logprobs": np.linspace(-1, 0, 7),
            "scores": np.zeros((3, 2, 5), np.float32),
            "none": np.empty((0, 4), np.int64),
        },
    }
    return SequenceState(**{**fields, **changes})


def assert_same_state(found: SequenceState, expected: SequenceState) -> None:
    """Equal in every field, bit for bit."""
    for name, value in vars(expected).items():
        other = getattr(found, name)
        if isinstance(value, np.ndarray):
            assert_same_array(other, value, name)
        elif name == "extras":
            assert list(other) == list(value)
            for key, array in value.items():
                assert_same_array(other[key], array, key)
        else:
            assert other == value, f"{name}: {other!r} != {value!r}"


def assert_same_array(found: np.ndarray, expected: np.ndarray, name: str) -> None:
    assert found.dtype == expected.dtype and found.shape == expected.shape, f"{name}: {found.shape}"
    assert found.tobytes() == expected.tobytes(), name
