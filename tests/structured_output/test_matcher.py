"""SequenceMatcher against brute force: masks by matching every text, triggers by reading whole outputs."""

from __future__ import annotations

import itertools
import random
import re

import pytest

from deepinfer.structured_output.matcher import MAX_TAKEN_BACK, Phase, SequenceMatcher, allows, failure_table
from tests.support.so_vocabulary import EOS, PAD_SIZE, TOKENS, matcher, tokens_of

# An expression, and a text that it matches; the texts that may still come are found by trying.
EXPRESSIONS = ["(ab|c)*", "a{2,4}b?", "é+", "(漢|é)[a-c]", "[ab]*1", "x漢1?", "abcabc", "(a|é|漢){0,3}2"]
MAX_TOKENS = 5


def is_match(expression: str, text: bytes) -> bool:
    try:
        return re.fullmatch(expression, text.decode()) is not None
    except UnicodeDecodeError:
        return False


def can_match(expression: str, prefix: bytes) -> bool:
    """Whether some short text behind the prefix completes a match."""
    endings = [b"", b"a", b"b", b"c", b"1", b"2", b"\xa9", b"\xbc\xa2", b"\xa2", b"\x00"]
    wholes = ["", "a", "b", "c", "1", "2", "é", "é2", "漢a", "漢1", "漢", "ab", "aab", "abc"]
    longer = ["bcabc", "cabc", "abcabc", "bca", "ca", "aa", "a2", "漢2", "éa"]
    return any(
        is_match(expression, prefix + ending + rest.encode())
        for ending, rest in itertools.product(endings, wholes + longer)
    )


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_masks_are_what_can_still_match(expression: str):
    """Tokens inside characters too; stop tokens where the text is complete; never specials or padding."""
    rng = random.Random(expression)
    num_ends = 0
    for _ in range(12):
        state, text = matcher("regex", expression), b""
        for _ in range(MAX_TOKENS):
            allowed = tokens_of(state.fill())
            wanted = {i for i, piece in enumerate(TOKENS) if piece and can_match(expression, text + piece)}
            wanted |= {EOS} if is_match(expression, text) else set()
            assert allowed == wanted, f"{text=} {allowed ^ wanted}"
            for token in range(3, PAD_SIZE + 3):
                if token not in allowed:
                    assert not state.accept(token), f"{text=} {token=}"
            token = rng.choice(sorted(allowed))
            assert state.accept(token)
            if token == EOS:
                num_ends += 1
                assert state.phase is Phase.ENDED and state.fill() is None and not state.accept(3)
                break
            text += TOKENS[token]
    assert num_ends > 0


def test_a_stop_token_of_the_request_ends_too():
    state = matcher("regex", "a*", stops=[EOS, 2])
    assert tokens_of(state.fill()) == {EOS, 2, 3}
    assert state.accept(3) and state.accept(2) and state.phase is Phase.ENDED


class Reference:
    """The rules of triggers and bounds, from the whole output at every step."""

    def __init__(self, trigger: tuple[int, ...], bound: int | None) -> None:
        self.trigger, self.bound = trigger, bound

    def read(self, output: list[int]) -> tuple[str, int | None, int]:
        """Phase, the token that is forced next, and the index where the grammar begins (-1: not yet)."""
        size = len(self.trigger)
        for end in range(len(output) + 1):
            if end >= size and tuple(output[end - size : end]) == self.trigger:
                return "grammar", None, end
            if self.bound is not None and end and output[end - 1] == self.bound:
                # What of the trigger has just been seen, then the rest of it.
                matched = max(k for k in range(size) if tuple(output[end - k : end]) == self.trigger[:k])
                begin = end + size - matched
                if begin <= len(output):
                    return "grammar", None, begin
                return "forcing", self.trigger[matched + len(output) - end], -1
        return "free", None, -1


def test_the_reference_reads_triggers():
    read = Reference((3, 4), 5).read
    assert read([]) == read([4, 3, 6]) == ("free", None, -1)
    assert read([3, 3, 4]) == ("grammar", None, 3) and read([3, 3, 4, 3, 4]) == ("grammar", None, 3)
    assert read([3, 5]) == ("forcing", 3, -1) and read([3, 5, 3]) == ("forcing", 4, -1)
    assert Reference((3, 4), 3).read([3]) == ("forcing", 4, -1)
    assert Reference((3,), 3).read([3]) == ("grammar", None, 1)


def take_back(state: SequenceMatcher, output: list[int], rng: random.Random) -> None:
    """The newest of the accepted tokens."""
    count = rng.randint(1, min(len(output), 8))
    state.rollback(count)
    del output[len(output) - count :]


TRIGGERS = [(3,), (3, 3), (3, 4), (3, 3, 4), (3, 4, 3, 4, 5), (3, 4, 3, 3, 4), (2, 3), (3, 4, 3, 4, 3)]


@pytest.mark.parametrize("bound", [None, 3, 4, 0, 7])
@pytest.mark.parametrize("trigger", TRIGGERS, ids=str)
def test_triggers_and_bounds(trigger: tuple[int, ...], bound: int | None):
    """Random outputs, taken back and gone over again as drafts are."""
    rng = random.Random(f"{trigger} {bound}")
    reference, phases = Reference(trigger, bound), set()
    for _ in range(60):
        state, output = matcher("regex", "[ab]*1", trigger, bound), []
        for _ in range(16):
            phase, forced, begin = reference.read(output)
            text = b"".join(TOKENS[token] for token in output[begin:]) if begin >= 0 else b""
            if phase == "grammar" and text.endswith(b"1"):
                phases.add("complete")
                assert tokens_of(state.fill()) == {EOS}
                break
            phases.add(phase)
            assert state.phase.name.lower() == phase
            words = state.fill()
            if phase == "free":
                assert words is None and not state.is_constrained
                likely = trigger[len(output) % len(trigger)]
                token = likely if rng.random() < 0.6 else rng.choice([0, 2, 3, 3, 3, 4, 4, 5, 7])
            elif phase == "forcing":
                assert tokens_of(words) == {forced}
                assert not state.accept(forced + 1)
                token = forced
            else:
                assert tokens_of(words) == {3, 4, 6, 16}
                assert not state.accept(5) and not state.accept(0)
                token = rng.choice([3, 4, 6, 16])
            assert state.accept(token)
            output.append(token)
            if rng.random() < 0.3:
                take_back(state, output, rng)
        state.reset()
        assert state.phase is (Phase.FREE if trigger else Phase.GRAMMAR)
    assert phases == {"free", "grammar", "complete"} | ({"forcing"} if bound in (3, 4, 0, 7) else set()) or (
        bound == trigger[0] and len(trigger) == 1
    )


def test_what_was_taken_back_comes_again():
    state = matcher("json", '{"type": "array", "items": {"enum": ["a", "é"]}}')
    rng, masks, output = random.Random(3), [], []
    while len(output) < 40:
        words = state.fill()
        del masks[len(output) :]
        masks.append(words)
        token = rng.choice(sorted(tokens_of(words) - {EOS})) if tokens_of(words) != {EOS} else EOS
        if token == EOS:
            break
        assert state.accept(token)
        output.append(token)
        if rng.random() < 0.4:
            take_back(state, output, rng)
            assert (state.fill() == masks[len(output)]).all()
    state.accept(EOS)
    state.rollback(1)
    assert (state.fill() == masks[len(output)]).all(), "the end is taken back too"


def test_as_much_as_drafts_need_can_be_taken_back():
    state = matcher("regex", "a*")
    for _ in range(200):
        assert state.accept(3)
    state.rollback(MAX_TAKEN_BACK)
    with pytest.raises(IndexError):
        state.rollback(1)


@pytest.mark.parametrize("size", range(8))
def test_failure_table(size: int):
    for pattern in itertools.product((0, 1), repeat=size):
        wanted = [
            max(k for k in range(end) if pattern[:k] == pattern[end - k : end]) for end in range(1, size + 1)
        ]
        assert failure_table(pattern) == wanted


def test_allows():
    words = matcher("regex", "[ab]").fill()
    assert [i for i in range(70) if allows(words, i)] == [3, 4] and not allows(words, -1)
