"""Intersects shapes, and tells whether a value fits or two shapes exclude each other."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from decimal import Decimal
from typing import Any

from deepinfer.structured_output import automaton
from deepinfer.structured_output.automaton import Automaton
from deepinfer.structured_output.errors import GrammarError, SchemaError
from deepinfer.structured_output.formats import FORMATS
from deepinfer.structured_output.numeric import MAX_MULTIPLE
from deepinfer.structured_output.regex import Regex, whole, within
from deepinfer.structured_output.shapes import (
    ANY,
    NEVER,
    Array,
    Const,
    Number,
    Object,
    Shape,
    String,
    Sub,
    joined,
    key_of,
)

MAX_PAIRS = 200_000  # of shapes intersected for one document
_DEPTH = 4  # how far impossible parts are searched for


class Meeting:
    """Operations on shapes; `shapes` tells those of a Sub."""

    def __init__(self, shapes: Callable[[Sub], tuple[Shape, ...]]) -> None:
        self._shapes = shapes
        self._pairs = 0

    def all_pairs(self, a: tuple[Shape, ...], b: tuple[Shape, ...], path: str) -> Iterator[Shape]:
        """Every intersection of a shape of `a` with one of `b`."""
        texts = {key_of(shape.value): shape for shape in b if isinstance(shape, Const)}
        others = [shape for shape in b if not isinstance(shape, Const)]
        for left in a:
            if isinstance(left, Const) and texts and key_of(left.value) in texts:
                yield left
            for right in others if isinstance(left, Const) else b:
                self._pairs += 1
                if self._pairs > MAX_PAIRS:
                    raise SchemaError(
                        path, f"its combinations multiply out to more than {MAX_PAIRS} pairs: simplify them"
                    )
                both = self.meet(left, right)
                if both is not None:
                    yield both

    def meet(self, a: Shape, b: Shape) -> Shape | None:
        """What both shapes admit; None when that is nothing."""
        if isinstance(b, Const):
            a, b = b, a
        if isinstance(a, Const):
            return a if self.fits(b, a.value) else None
        if type(a) is not type(b):
            return None
        match a:
            case Number():
                if a.step and b.step and math.lcm(a.step, b.step) > MAX_MULTIPLE:
                    step = math.lcm(a.step, b.step)
                    raise SchemaError(a.path, f"multiples of {step}: up to {MAX_MULTIPLE} can be enforced")
                step = math.lcm(a.step, b.step) if a.step and b.step else a.step or b.step
                return Number(a.bounds & b.bounds, step, a.path)
            case String():
                low, high = _range(a, b)
                patterns = tuple(dict.fromkeys(a.patterns + b.patterns))
                formats = tuple(dict.fromkeys(a.formats + b.formats))
                return String(low, high, patterns, formats, a.path)
            case Array():
                return _meet_arrays(a, b)
        return _meet_objects(a, b)

    # --- values -----------------------------------------------------------------------------------------

    def admits(self, sub: Sub, value: Any) -> bool:
        """Whether a value has one of the shapes of `sub`."""
        return sub == ANY or any(self.fits(shape, value) for shape in self._shapes(sub))

    def fits(self, shape: Shape, value: Any) -> bool:
        """Whether a value has a shape."""
        if isinstance(shape, Const):
            return key_of(shape.value) == key_of(value)
        match value:
            case None | bool():
                return False
            case int() | float():
                return isinstance(shape, Number) and _fits_number(shape, value)
            case str():
                return isinstance(shape, String) and fits_string(shape, value)
            case list():
                return isinstance(shape, Array) and self._fits_array(shape, value)
        return isinstance(shape, Object) and self._fits_object(shape, value)

    def _fits_array(self, shape: Array, value: list) -> bool:
        if not _within(shape, len(value)):
            return False
        if shape.unique and len({key_of(item) for item in value}) < len(value):
            return False
        return all(self.admits(shape.item(place), item) for place, item in enumerate(value))

    def _fits_object(self, shape: Object, value: dict) -> bool:
        if not _within(shape, len(value)) or not set(shape.required) <= set(value):
            return False
        return all(
            self.admits(shape.names, name) and self.admits(self.lookup(shape, name), child)
            for name, child in value.items()
        )

    @staticmethod
    def matching(shape: Object, name: str) -> Sub:
        """What patternProperties say about a key."""
        found: Sub = ANY
        for _, pattern, sub in shape.patterns:
            if automaton.of_regex(within(pattern)).accepts(name):
                found = joined(found, sub)
        return found

    @staticmethod
    def lookup(shape: Object, name: str) -> Sub:
        """What applies to the value of a key."""
        for known, sub in shape.properties:
            if known == name:
                return sub
        matching = Meeting.matching(shape, name)
        return matching if matching != ANY else shape.additional

    # --- exclusion --------------------------------------------------------------------------------------

    def overlaps(
        self, branches: list[tuple[Shape, ...]], around: tuple[Shape, ...], path: str
    ) -> Iterator[tuple[int, int]]:
        """Pairs of branches (later, earlier) that an output of one of them may satisfy together."""
        narrowed = [tuple(self.all_pairs(branch, around, path)) for branch in branches]
        for place, branch in enumerate(narrowed):
            for other in range(place):
                for written, read in ((branch, narrowed[other]), (narrowed[other], branch)):
                    if self._overlap(tuple(as_written(shape) for shape in written), read, path):
                        yield place, other

    def _overlap(self, a: tuple[Shape, ...], b: tuple[Shape, ...], path: str) -> bool:
        try:
            return any(self.possible(both) for both in self.all_pairs(a, b, path))
        except SchemaError:  # an intersection that cannot be written down is not known to be empty
            return True

    def possible(self, shape: Shape, depth: int = _DEPTH) -> bool:
        """Whether some value may have a shape; True when it takes long to find out."""
        match shape:
            case Number():
                low, high = shape.bounds.integers()
                bounds = shape.bounds
                if shape.step:
                    return low <= high and high // shape.step * shape.step >= low
                if bounds.low is None or bounds.high is None:
                    return True
                return bounds.low < bounds.high or (
                    bounds.low == bounds.high and not bounds.low_strict and not bounds.high_strict
                )
            case String():
                if shape.high is not None and shape.low > shape.high:
                    return False
                if not shape.patterns and not shape.formats:
                    return True
                try:
                    return not string_automaton(shape).is_empty
                except SchemaError:
                    return True
            case Array():
                if shape.high is not None and shape.low > shape.high:
                    return False
                needed = {shape.item(place) for place in range(min(shape.low, len(shape.prefix) + 1))}
                return all(self._possible_sub(sub, depth - 1) for sub in needed)
            case Object():
                if shape.high is not None and max(shape.low, len(shape.required)) > shape.high:
                    return False
                subs = {self.lookup(shape, name) for name in shape.required}
                return all(self._possible_sub(sub, depth - 1) for sub in subs)
        return True

    def _possible_sub(self, sub: Sub, depth: int) -> bool:
        return depth == 0 or any(self.possible(shape, depth) for shape in self._shapes(sub))


def as_written(shape: Shape) -> Shape:
    """What is generated for a shape: what nobody spoke about is left out where something is declared."""
    if isinstance(shape, Object) and shape.declared and not shape.explicit:
        return replace(shape, additional=NEVER, explicit=True)
    if isinstance(shape, Array) and shape.prefix and not shape.explicit:
        return replace(shape, rest=NEVER, explicit=True)
    return shape


def _expressions(shape: String) -> list[tuple[str, Regex]]:
    """All that a string follows beside its length, with paths."""
    nodes = [(path, within(pattern)) for path, pattern in shape.patterns]
    return nodes + [(path, whole(FORMATS[name])) for path, name in shape.formats]


def single_expression(shape: String) -> Regex | None:
    """The one expression that a string follows; None when there are several conditions, or none.

    Raises:
        SchemaError: it is too large.
    """
    nodes = _expressions(shape)
    if len(nodes) != 1 or shape.low or shape.high is not None:
        return None
    path, node = nodes[0]
    try:
        automaton.check_size(node)
    except GrammarError as error:
        raise SchemaError(path, str(error)) from None
    return node


def string_automaton(shape: String) -> Automaton:
    """The strings of a shape.

    Raises:
        SchemaError: too many states, at the path of the first pattern or format.
    """
    path = (*shape.patterns, *shape.formats, (shape.path, ""))[0][0]
    try:
        result = automaton.ANY_TEXT
        for _, node in _expressions(shape):
            result &= automaton.of_regex(node)
        if shape.low or shape.high is not None:
            result &= automaton.of_length(shape.low, shape.high)
    except SchemaError:
        raise
    except GrammarError as error:
        raise SchemaError(path, str(error)) from None
    return result


def fits_string(shape: String, value: str) -> bool:
    """Whether a string has a shape."""
    if not _within(shape, len(value)):
        return False
    for path, node in _expressions(shape):
        try:
            if not automaton.of_regex(node).accepts(value):
                return False
        except GrammarError as error:
            raise SchemaError(path, str(error)) from None
    return True


def _fits_number(shape: Number, value: float) -> bool:
    if not shape.bounds.contains(Decimal(value) if isinstance(value, int) else Decimal(repr(value))):
        return False
    return not shape.step or (value == int(value) and int(value) % shape.step == 0)


def _within(shape: String | Array | Object, count: int) -> bool:
    return shape.low <= count and (shape.high is None or count <= shape.high)


def _range(a: Any, b: Any) -> tuple[int, int | None]:
    highs = [high for high in (a.high, b.high) if high is not None]
    return max(a.low, b.low), min(highs, default=None)


def _meet_arrays(a: Array, b: Array) -> Array:
    low, high = _range(a, b)
    length = max(len(a.prefix), len(b.prefix))
    prefix = tuple(joined(a.item(place), b.item(place)) for place in range(length))
    rest, explicit = joined(a.rest, b.rest), a.explicit or b.explicit
    return Array(prefix, rest, explicit, low, high, a.unique or b.unique, a.path)


def _meet_objects(a: Object, b: Object) -> Object:
    names = dict.fromkeys([name for name, _ in a.properties] + [name for name, _ in b.properties])
    properties = tuple((name, joined(Meeting.lookup(a, name), Meeting.lookup(b, name))) for name in names)
    if a.patterns != b.patterns and (
        (a.patterns and b.explicit and b.additional)
        or (b.patterns and a.explicit and a.additional)
        or (a.patterns and b.patterns and (a.explicit or b.explicit))
    ):
        path = (a.patterns or b.patterns)[0][0]
        raise SchemaError(
            path, "cannot be combined with another schema's additionalProperties: put both into one schema"
        )
    low, high = _range(a, b)
    return Object(
        properties=properties,
        required=tuple(dict.fromkeys(a.required + b.required)),
        patterns=tuple(dict.fromkeys(a.patterns + b.patterns)),
        additional=joined(a.additional, b.additional),
        explicit=a.explicit or b.explicit,
        declared=a.declared or b.declared,
        names=joined(a.names, b.names),
        low=low,
        high=high,
        path=a.path,
    )
