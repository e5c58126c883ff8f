"""What a JSON value can look like: one shape per type, with everything that a schema says about it.

Schemas inside a shape are named, not held: a `Sub` is a tuple of paths into the document, all of which apply.
So recursive schemas are finite, and an intersection of schemas is a longer tuple.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from deepinfer.structured_output.numeric import FREE, Bounds

Sub = tuple[str, ...]
ANY: Sub = ()
NEVER: Sub = ("never",)  # no path starts like this


@dataclass(frozen=True)
class Const:
    """Exactly one value, as compact JSON."""

    text: str

    @property
    def value(self) -> Any:
        """The value."""
        return json.loads(self.text)


@dataclass(frozen=True)
class Number:
    """Any number; `step` > 0: only its integer multiples, 0: fractions as well."""

    bounds: Bounds = FREE
    step: int = 0
    path: str = "#"


@dataclass(frozen=True)
class String:
    """Any string; `patterns` are (path, expression), `formats` (path, name)."""

    low: int = 0
    high: int | None = None
    patterns: tuple[tuple[str, str], ...] = ()
    formats: tuple[tuple[str, str], ...] = ()
    path: str = "#"


@dataclass(frozen=True)
class Array:
    """Any array: the first items follow `prefix`, the others `rest`. With `explicit` unset nothing was said
    about the others."""

    prefix: tuple[Sub, ...] = ()
    rest: Sub = ANY
    explicit: bool = False
    low: int = 0
    high: int | None = None
    unique: bool = False
    path: str = "#"

    def item(self, place: int) -> Sub:
        """What applies to an item."""
        return self.prefix[place] if place < len(self.prefix) else self.rest


@dataclass(frozen=True)
class Object:
    """Any object. Keys that are neither in `properties` nor match one of `patterns` follow `additional`; with
    `explicit` unset nothing was said about them."""

    properties: tuple[tuple[str, Sub], ...] = ()
    required: tuple[str, ...] = ()
    patterns: tuple[tuple[str, str, Sub], ...] = ()  # (path, expression, what applies)
    additional: Sub = ANY
    explicit: bool = False
    declared: bool = False  # properties or patterns were given
    names: Sub = ANY  # what applies to keys
    low: int = 0
    high: int | None = None
    path: str = "#"


Shape = Const | Number | String | Array | Object


def joined(a: Sub, b: Sub) -> Sub:
    """Both apply."""
    return tuple(sorted({*a, *b}))


def key_of(value: Any) -> object:
    """Equal for values that JSON Schema calls equal: 1 and 1.0 are, 1 and true are not."""
    if isinstance(value, bool) or value is None:
        return repr(value)
    if isinstance(value, dict):
        return frozenset((name, key_of(child)) for name, child in value.items())
    if isinstance(value, list):
        return tuple(key_of(child) for child in value)
    return (str, value) if isinstance(value, str) else (float, value)


def const(value: Any) -> Const:
    """The shape of one value."""
    return Const(json.dumps(value, ensure_ascii=False, separators=(",", ":")))
