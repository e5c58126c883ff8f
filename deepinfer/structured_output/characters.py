"""Sets of characters as sorted ranges of code points, without the surrogates, which no text contains."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable

Ranges = tuple[tuple[int, int], ...]  # inclusive, ascending, neither touching nor overlapping

EVERY: Ranges = ((0, 0xD7FF), (0xE000, 0x10FFFF))


def ranges_of(pairs: Iterable[tuple[int, int]]) -> Ranges:
    """The normal form of any list of inclusive ranges."""
    merged: list[tuple[int, int]] = []
    for low, high in sorted(pairs):
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(merged[-1][1], high))
        elif low <= high:
            merged.append((low, high))
    return tuple(merged)


def characters(text: str) -> Ranges:
    """The set of the characters of a text."""
    return ranges_of((ord(c), ord(c)) for c in text)


def union(*sets: Ranges) -> Ranges:
    """What is in any of the sets."""
    return ranges_of(pair for ranges in sets for pair in ranges)


def intersection(a: Ranges, b: Ranges) -> Ranges:
    """What is in both sets."""
    pairs = []
    i = j = 0
    while i < len(a) and j < len(b):
        low, high = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if low <= high:
            pairs.append((low, high))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return ranges_of(pairs)


def complement(ranges: Ranges) -> Ranges:
    """Every character that is not in the set."""
    pairs, start = [], 0
    for low, high in ranges:
        pairs.append((start, low - 1))
        start = high + 1
    pairs.append((start, 0x10FFFF))
    return intersection(ranges_of(pairs), EVERY)


def contains(ranges: Ranges, code: int) -> bool:
    """Whether a code point is in the set."""
    return any(low <= code <= high for low, high in ranges)


# Regex dialects disagree about \d, \w, \s and the dot. A set that a pattern asks for holds what all of them
# agree on, and a set that it rules out holds what any of them rules out: so the output suits every reader.

DIGITS = characters("0123456789")
WORDS = ranges_of([(0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)])
SPACES = characters("\t\n\v\f\r \u00a0\u1680\u2028\u2029\u202f\u205f\u3000") + ((0x2000, 0x200A),)
SPACES = ranges_of(SPACES)
WIDE_SPACES = union(SPACES, characters("\x1c\x1d\x1e\x1f\x85\ufeff"))
LINE_ENDS = characters("\n\r\u2028\u2029")


@functools.cache
def wide_digits() -> Ranges:
    """What some dialect counts as a digit."""
    return _where(str.isdecimal)


@functools.cache
def wide_words() -> Ranges:
    """What some dialect counts as a character of a word."""
    return union(_where(str.isalnum), WORDS)


def _where(test: Callable[[str], bool]) -> Ranges:
    return ranges_of((code, code) for low, high in EVERY for code in range(low, high + 1) if test(chr(code)))
