"""Which shapes an output can consist of: found from the root on; those without a finite text are dropped."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from deepinfer.structured_output import automaton, numeric
from deepinfer.structured_output.automaton import Automaton
from deepinfer.structured_output.direct import is_direct
from deepinfer.structured_output.document import Document
from deepinfer.structured_output.errors import GrammarError, SchemaError
from deepinfer.structured_output.meet import Meeting, as_written, single_expression, string_automaton
from deepinfer.structured_output.regex import within
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
)

MAX_SUBS = 5_000  # different combinations of schemas
MAX_REGIONS = 16  # sets of keys that patternProperties tell apart
MAX_UNIQUE = 6  # values of which an array may hold each once


class Reachable:
    """The shapes below the root of a document.

    Attributes:
        shapes: of every Sub that is reached, as they are written.
        keys: undeclared keys of an object: sets of them (None: any key) and what applies to their values.
        finite: the Subs that some finite text satisfies.
    """

    def __init__(self, document: Document) -> None:
        self.document = document
        self.shapes: dict[Sub, list[Shape]] = {}
        self.keys: dict[Object, list[tuple[Automaton | None, Sub]]] = {}
        self._find(("#",))
        self.finite: set[Sub] = set()
        self._drop_endless()

    def _find(self, root: Sub) -> None:
        todo = [root]
        while todo:
            sub = todo.pop()
            if sub in self.shapes:
                continue
            if len(self.shapes) >= MAX_SUBS:
                raise SchemaError(
                    (sub or ("#",))[0],
                    f"more than {MAX_SUBS} combinations of schemas: simplify allOf and $ref",
                )
            shapes = [self._prepared(shape) for shape in self.document.shapes(sub)]
            self.shapes[sub] = shapes
            for shape in shapes:
                todo += reversed(list(self._children(shape)))

    def _prepared(self, shape: Shape) -> Shape:
        if isinstance(shape, Object):
            shape = self._with_named_keys(shape)
        shape = as_written(shape)
        if isinstance(shape, Object):
            self.keys[shape] = self._key_sets(shape)
            self._check_count(shape)
        return shape

    def _children(self, shape: Shape) -> Iterable[Sub]:
        if isinstance(shape, Array):
            count = len(shape.prefix) if shape.high is None else min(len(shape.prefix), shape.high)
            yield from shape.prefix[:count]
            if shape.high is None or shape.high > count:
                yield shape.rest
        elif isinstance(shape, Object):
            yield from (sub for _, sub in shape.properties)
            yield from (sub for _, sub in self.keys[shape])

    def _with_named_keys(self, shape: Object) -> Object:
        """Declares required names and, when only certain names are allowed, all of those; drops others."""
        properties = dict(shape.properties)
        for name in shape.required:
            properties.setdefault(name, Meeting.lookup(shape, name))
        additional, explicit = shape.additional, shape.explicit
        patterns = shape.patterns
        if shape.names != ANY:
            names = self.document.shapes(shape.names)
            if all(isinstance(name, Const) for name in names):
                for name in names:
                    if isinstance(name.value, str):
                        properties.setdefault(name.value, Meeting.lookup(shape, name.value))
                additional, explicit, patterns = NEVER, True, ()
            for name in properties:
                if not self.document.admits(shape.names, name):
                    properties[name] = NEVER
        return Object(
            tuple(properties.items()), shape.required, patterns, additional, explicit, shape.declared,
            shape.names, shape.low, shape.high, shape.path,
        )  # fmt: skip

    def _key_sets(self, shape: Object) -> list[tuple[Automaton | None, Sub]]:
        """Undeclared keys: sets of them and what applies to their values; None stands for any key."""
        if not shape.patterns and not self.document.shapes(shape.additional):
            return []
        if not shape.patterns and not shape.properties and shape.names == ANY:
            return [(None, shape.additional)]
        path = shape.path
        try:
            rest = automaton.ANY_TEXT if shape.names == ANY else self._strings(shape.names)
            if shape.properties:
                rest &= automaton.of_texts([name for name, _ in shape.properties]).complement()
            regions: list[tuple[Automaton, Sub]] = [(rest, ANY)]
            for path, pattern, sub in shape.patterns:  # noqa: B007  # the last path names the error
                matching = automaton.of_regex(within(pattern))
                other = matching.complement()
                regions = [
                    region
                    for keys, known in regions
                    for region in ((keys & matching, joined(known, sub)), (keys & other, known))
                    if not region[0].is_empty
                ]
                if len(regions) > MAX_REGIONS:
                    raise GrammarError(f"overlaps with too many others: at most {MAX_REGIONS} sets of keys")
        except SchemaError:
            raise
        except GrammarError as error:
            raise SchemaError(path, str(error)) from None
        sets = [(keys, shape.additional if sub == ANY else sub) for keys, sub in regions]
        return [(keys, sub) for keys, sub in sets if not keys.is_empty and self.document.shapes(sub)]

    def _strings(self, sub: Sub) -> Automaton:
        """All strings that a schema of keys admits."""
        shapes = self.document.shapes(sub)
        texts = [s.value for s in shapes if isinstance(s, Const) and isinstance(s.value, str)]
        none_of = automaton.of_texts(texts).complement()
        for shape in shapes:
            if isinstance(shape, String):
                none_of &= string_automaton(shape).complement()
        return none_of.complement()

    def _check_count(self, shape: Object) -> None:
        if self.keys[shape] and shape.low > len(shape.required) + 1:
            raise SchemaError(
                f"{shape.path}/minProperties",
                f"is {shape.low}: keys that are not declared might repeat, so at most "
                f"{len(shape.required) + 1} (the required ones and one more) can be enforced: declare "
                "properties and set additionalProperties to false",
            )

    def _drop_endless(self) -> None:
        """Keeps what has a finite text: grows the set until nothing is added."""
        grown = True
        while grown:
            grown = False
            for sub, shapes in self.shapes.items():
                if sub not in self.finite and any(self.is_finite(shape) for shape in shapes):
                    self.finite.add(sub)
                    grown = True

    def is_finite(self, shape: Shape) -> bool:
        """Whether some finite text has a shape, as far as found so far."""
        match shape:
            case Number():
                return not number_automaton(shape).is_empty
            case String():
                if not shape.patterns and not shape.formats:
                    return shape.high is None or shape.low <= shape.high
                node = single_expression(shape)
                if node is not None and is_direct(node, json=True):
                    return True
                return not string_automaton(shape).is_empty
            case Array():
                if shape.high is not None and shape.low > shape.high:
                    return False
                if shape.unique and self.unique_values(shape) is not None:
                    return shape.low <= len(self.unique_values(shape) or ())
                needed = range(min(shape.low, len(shape.prefix) + 1))
                return all(shape.item(place) in self.finite for place in needed)
            case Object():
                low, high = shape.low, shape.high
                if not all(dict(shape.properties)[name] in self.finite for name in shape.required):
                    return False
                written = sum(sub in self.finite for _, sub in shape.properties)
                most = written + any(sub in self.finite for _, sub in self.keys[shape])
                return low <= most and (high is None or (len(shape.required) <= high and low <= high))
        return True

    def unique_values(self, shape: Array) -> list[Any] | None:
        """The values that items may have when these are few."""
        if shape.prefix:
            return None
        shapes = self.document.shapes(shape.rest)
        if len(shapes) > MAX_UNIQUE or not all(isinstance(item, Const) for item in shapes):
            return None
        return [item.value for item in shapes if isinstance(item, Const)]


def number_automaton(shape: Number) -> Automaton:
    """The texts of a number shape."""
    try:
        if not shape.step:
            return numeric.numbers(shape.bounds)
        found = numeric.integers(shape.bounds)
        return found if shape.step == 1 else found & numeric.multiples(shape.step)
    except GrammarError as error:
        raise SchemaError(shape.path, str(error)) from None
