"""The record of a sequence: what comes out is what went in, and nothing else is believed."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from deepinfer.kv_transfer import sequence_state
from deepinfer.kv_transfer.sequence_state import SequenceState, SequenceStateError
from tests.kv_transfer.toys import assert_same_state, toy_identity, toy_layout, toy_state


def encoded(state: SequenceState) -> bytes:
    return b"".join(state.encode())


@pytest.mark.parametrize("num_blocks", [3, 5])
def test_round_trip(num_blocks: int) -> None:
    state = toy_state(num_blocks=num_blocks)
    parts = state.encode()
    data = b"".join(parts)
    assert sequence_state.num_bytes(parts) == len(data)
    assert_same_state(SequenceState.decode(data), state)
    assert encoded(SequenceState.decode(data)) == data


def test_empty_parts() -> None:
    """No drafts, nothing computed, no blocks, no extras."""
    state = toy_state(
        num_computed=0,
        drafts=np.empty(0, np.int32),
        draft_confidences=np.empty(0, np.float32),
        blocks=np.empty((0, toy_layout().block_bytes), np.uint8),
        sampling={},
        extras={},
    )
    assert_same_state(SequenceState.decode(encoded(state)), state)
    state.check(toy_identity().digest(), toy_layout())


def test_arrays_are_views_and_not_copies() -> None:
    data = encoded(toy_state())
    state = SequenceState.decode(data)
    assert not state.blocks.flags.owndata and not state.blocks.flags.writeable
    address = np.frombuffer(data, np.uint8).ctypes.data
    for array in (state.blocks, state.slot, state.token_ids):
        assert 0 <= array.ctypes.data - address < len(data) and (array.ctypes.data - address) % 64 == 0


def test_non_contiguous_arrays() -> None:
    blocks = toy_state().blocks
    state = toy_state(blocks=np.repeat(blocks, 2, axis=0)[::2], token_ids=np.arange(22, dtype=np.int32)[::2])
    found = SequenceState.decode(encoded(state))
    assert np.array_equal(found.blocks, blocks) and np.array_equal(found.token_ids, np.arange(0, 22, 2))


def test_numbers_survive() -> None:
    """Seeds of 64 bits and floats that JSON has to write out fully."""
    sampling = {"seed": 2**64 - 1, "top_p": 0.1 + 0.2, "bias": [[5, -1.5]], "name": "ä\n", "none": None}
    assert SequenceState.decode(encoded(toy_state(sampling=sampling))).sampling == sampling


def test_every_flipped_byte_of_the_head() -> None:
    data = encoded(toy_state())
    head = int.from_bytes(data[12:16], "little") + 16 + 32
    for at in range(head):
        bad = bytearray(data)
        bad[at] ^= 1 << (at % 8)
        with pytest.raises(SequenceStateError):
            SequenceState.decode(bad)


def test_every_length() -> None:
    data = encoded(toy_state())
    for length in range(len(data)):
        with pytest.raises(SequenceStateError):
            SequenceState.decode(data[:length])


def forged(**changes: object) -> bytes:
    """A record whose head was changed and its checksum made right again."""
    data = encoded(toy_state())
    size = int.from_bytes(data[12:16], "little")
    fields = json.loads(data[16 : 16 + size])
    for name, value in changes.items():
        if callable(value):
            value(fields[name])
        elif value is None:
            del fields[name]
        else:
            fields[name] = value
    text = json.dumps(fields).encode()
    head = sequence_state._FIXED.pack(sequence_state.MAGIC, sequence_state.VERSION, len(text)) + text
    head += sequence_state.hashlib.sha256(head).digest()
    old = size + 48
    return head + bytes(-len(head) % 64) + data[old + -old % 64 :]


def set_place(row: int, place: int, value: object):
    def change(table: list) -> None:
        table[row][place] = value

    return change


@pytest.mark.parametrize(
    "changes",
    [
        {"arrays": set_place(0, 1, "object")},
        {"arrays": set_place(0, 1, "float32")},
        {"arrays": set_place(0, 2, [-1])},
        {"arrays": set_place(0, 2, [1 << 62])},
        {"arrays": set_place(0, 2, [1, 1, 1, 1, 11])},
        {"arrays": set_place(0, 2, 11)},
        {"arrays": set_place(0, 3, -64)},
        {"arrays": set_place(0, 3, 1 << 40)},
        {"arrays": set_place(0, 0, "blocks")},
        {"arrays": lambda table: table.pop(0)},
        {"arrays": lambda table: table.extend([["x", "uint8", [0], 0]] * 300)},
        {"arrays": 5},
        {"identity": "00"},
        {"identity": "xyz"},
        {"num_prompt": 0},
        {"num_prompt": 12},
        {"num_computed": -1},
        {"num_computed": "many"},
        {"sampling": None},
        {"sampling": 3},
    ],
)
def test_heads_that_lie(changes: dict[str, object]) -> None:
    assert_same_state(SequenceState.decode(forged()), toy_state())  # the forger knows the trade
    with pytest.raises(SequenceStateError):
        SequenceState.decode(forged(**changes))


@pytest.mark.parametrize("text", [b"[]", b"3", b"nonsense", b"\xff"])
def test_heads_without_fields(text: bytes) -> None:
    head = sequence_state._FIXED.pack(sequence_state.MAGIC, sequence_state.VERSION, len(text)) + text
    with pytest.raises(SequenceStateError):
        SequenceState.decode(head + sequence_state.hashlib.sha256(head).digest() + bytes(64))


def test_words_of_the_refusals() -> None:
    data = bytearray(encoded(toy_state()))
    with pytest.raises(SequenceStateError, match="no state of a sequence"):
        SequenceState.decode(b"x" * 100)
    data[8] = 9
    with pytest.raises(SequenceStateError, match="version 9; this program reads version 1"):
        SequenceState.decode(data)


def test_check_against_an_engine() -> None:
    identity, layout = toy_identity().digest(), toy_layout()
    toy_state().check(identity, layout)
    with pytest.raises(SequenceStateError, match="another model"):
        toy_state().check(toy_identity(model="other").digest(), layout)
    with pytest.raises(SequenceStateError, match="this engine has 192 and 321"):
        toy_state().check(identity, replace(layout, slot_bytes=321))
    with pytest.raises(SequenceStateError, match="2 blocks do not hold its 10 computed tokens"):
        toy_state(num_blocks=2).check(identity, layout)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"token_ids": np.arange(5)}, "token_ids must be int32"),
        ({"slot": np.zeros((2, 2), np.uint8)}, "slot must be uint8 with 1"),
        ({"draft_confidences": np.zeros(2, np.float32)}, "3 drafts have 2 confidences"),
        ({"extras": {"slot": np.zeros(1)}}, "reserved"),
        ({"extras": {"x": np.array([object()])}}, "dtype object"),
        ({"identity": b"short"}, "identity has 5 bytes"),
        ({"num_computed": 99}, "num_computed=99"),
    ],
)
def test_states_that_cannot_be(changes: dict[str, object], words: str) -> None:
    with pytest.raises(SequenceStateError, match=words):
        toy_state(**changes)


def test_sampling_has_to_be_plain() -> None:
    with pytest.raises(SequenceStateError, match="plain"):
        toy_state(sampling={"f": print}).encode()
