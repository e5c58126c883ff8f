"""Writes the grammar of the JSON texts that a schema admits.

Style of the texts: one way to write each value. A comma or colon may be followed by one space, there is no
other whitespace; properties come in the order of the schema, undeclared ones behind them; strings contain
characters as they are, escaped only where JSON demands it and then in the shortest form (nowhere, if all that
bounds a string is its length); numbers are written as in `numeric`.
"""

from __future__ import annotations

from typing import Any

from deepinfer.structured_output.characters import EVERY
from deepinfer.structured_output.direct import direct
from deepinfer.structured_output.document import Document
from deepinfer.structured_output.ebnf import PLAIN, Writer, class_of, escaped, literal, repeated
from deepinfer.structured_output.errors import GrammarError, SchemaError
from deepinfer.structured_output.meet import single_expression, string_automaton
from deepinfer.structured_output.reachable import MAX_UNIQUE, Reachable, number_automaton
from deepinfer.structured_output.shapes import (
    Array,
    Const,
    Number,
    Object,
    Shape,
    String,
    Sub,
    const,
)

MAX_OPTIONAL = 200  # optional properties in a row: all of them are possible at once
MAX_COUNTED = 20_000  # properties times counts, where minProperties or maxProperties count them

MAX_EXACT_LENGTH = 8  # minLength without maxLength: up to it also the first characters may be escaped ones

PLAIN_CHARACTER = class_of(PLAIN)
COMMA, COLON = '"," sp', '":" sp'


def json_grammar(schema: Any) -> str:
    """The EBNF grammar (root rule `root`) of a schema.

    Raises:
        SchemaError: naming the path of what is invalid, cannot be enforced or is too large.
    """
    return _Grammar(Document(schema)).text()


def any_object_grammar() -> str:
    """The EBNF grammar of any JSON object."""
    return json_grammar({"type": "object"})


class _Grammar:
    """Writes a rule for every Sub that some finite text satisfies."""

    def __init__(self, document: Document) -> None:
        self._reach = Reachable(document)
        self._writer = Writer()
        self._names: dict[object, str] = {}
        self._path = "#"

    def text(self) -> str:
        """The whole grammar."""
        if ("#",) not in self._reach.finite:
            raise SchemaError("#", "no value satisfies this schema")
        writer = self._writer
        try:
            writer.rule("sp", '""', '" "')
            writer.rule("text", '"\\""', f"{writer.character(EVERY, json=True)} text")
            names = {sub: self._name(sub) for sub in self._reach.shapes if sub in self._reach.finite}
            for sub, name in names.items():
                options = [
                    self._shape(shape) for shape in self._reach.shapes[sub] if self._reach.is_finite(shape)
                ]
                writer.rule(name, *dict.fromkeys(options))
        except SchemaError:
            raise
        except GrammarError as error:
            raise SchemaError(self._path, str(error)) from None
        return writer.text(names[("#",)])

    def _name(self, sub: Sub) -> str:
        if sub not in self._names:
            self._names[sub] = self._writer.fresh("v")
        return self._names[sub]

    def _shape(self, shape: Shape) -> str:
        self._path = getattr(shape, "path", self._path)
        match shape:
            case Const():
                return self._constant(shape.value)
            case Number():
                return self._writer.automaton(number_automaton(shape), json=False)
            case String():
                return self._string(shape)
            case Array():
                return f'"[" {self._array(shape)} "]"'
            case Object():
                return f'"{{" {self._object(shape)} "}}"'
        raise AssertionError(f"{shape=}")

    def _constant(self, value: Any) -> str:
        match value:
            case str():
                return literal(f'"{escaped(value)}"')
            case list():
                items = f" {COMMA} ".join(self._constant(item) for item in value)
                return f'"[" {items} "]"' if items else literal("[]")
            case dict():
                pairs = (f"{_key(name)} {COLON} {self._constant(child)}" for name, child in value.items())
                items = f" {COMMA} ".join(pairs)
                return f'"{{" {items} "}}"' if items else literal("{}")
        return literal(const(value).text)

    def _string(self, shape: String) -> str:
        node = single_expression(shape)
        written = None if node is None else direct(self._writer, node, json=True)
        if written is not None:
            return f'"\\"" {written} "\\""'
        if shape.patterns or shape.formats or (shape.high is None and 0 < shape.low <= MAX_EXACT_LENGTH):
            return f'"\\"" {self._writer.automaton(string_automaton(shape), json=True)}'
        if shape.high is not None:  # a set of bytes repeats fast, a rule does not
            return f'"\\"" {repeated(PLAIN_CHARACTER, shape.low, shape.high)} "\\""'
        return f'"\\"" {repeated(PLAIN_CHARACTER, shape.low, shape.low)} text'

    def _array(self, shape: Array) -> str:
        if shape.unique and (shape.high is None or shape.high > 1):
            return self._unique_items(shape)
        count = len(shape.prefix) if shape.high is None else min(len(shape.prefix), shape.high)
        name = self._rest(shape, count)
        for place in reversed(range(count)):
            options = ['""'] if place >= shape.low else []
            if shape.prefix[place] in self._reach.finite:
                options.append(f"{f'{COMMA} ' if place else ''}{self._name(shape.prefix[place])} {name}")
            name = self._writer.rule(self._writer.fresh("t"), *options)
        return name

    def _rest(self, shape: Array, count: int) -> str:
        """The items from place `count` on, all of the same kind."""
        high = None if shape.high is None else shape.high - count
        low = max(shape.low - count, 0)
        if high == 0 or shape.rest not in self._reach.finite:
            return '""'
        item = self._name(shape.rest)
        following = f"({COMMA} {item})"
        if count:
            return repeated(following, low, high)
        more = repeated(following, max(low - 1, 0), None if high is None else high - 1)
        return self._writer.rule(self._writer.fresh("t"), *['""'] * (low == 0), f"{item} {more}")

    def _unique_items(self, shape: Array) -> str:
        values = self._reach.unique_values(shape)
        if values is None:
            raise SchemaError(
                f"{shape.path}/uniqueItems",
                f"can be enforced for items of an enum of up to {MAX_UNIQUE} values only",
            )
        high = len(values) if shape.high is None else min(shape.high, len(values))
        names = {0: self._writer.fresh("u")}

        def rule(used: int) -> str:
            count = used.bit_count()
            options = ['""'] if count >= shape.low else []
            for place, value in enumerate(values if count < high else ()):
                if not used >> place & 1:
                    after = used | 1 << place
                    if after not in names:
                        names[after] = self._writer.fresh("u")
                        rule(after)
                    options.append(f"{f'{COMMA} ' if used else ''}{self._constant(value)} {names[after]}")
            return self._writer.rule(names[used], *options)

        return rule(0)

    # --- objects ----------------------------------------------------------------------------------------

    def _object(self, shape: Object) -> str:
        """Rules from the last property to the first: what may follow when `count` are written so far.

        Counts stand for all larger ones as soon as neither bound can tell them apart.
        """
        properties = [(name, sub) for name, sub in shape.properties if sub in self._reach.finite]
        pairs = self._undeclared(shape)
        required = set(shape.required)
        run = longest = 0
        for name, _ in properties:
            run = 0 if name in required else run + 1
            longest = max(longest, run)
        if longest > MAX_OPTIONAL:
            raise SchemaError(
                f"{shape.path}/properties",
                f"has {longest} optional properties in a row, any of which may come next: at most "
                f"{MAX_OPTIONAL} can be enforced; require some of them",
            )
        most = len(properties) if not pairs else None
        low = shape.low if shape.low > len(required) else 0
        high = shape.high if most is None or shape.high is None or shape.high < most else None
        top = max(low, 1, 0 if high is None else high)
        if top * len(properties) > MAX_COUNTED:
            keyword = "maxProperties" if high is not None else "minProperties"
            raise SchemaError(
                f"{shape.path}/{keyword}",
                f"counts {len(properties)} properties up to {top}: {MAX_COUNTED // len(properties)} can be "
                "enforced",
            )
        following = {count: self._end(pairs, count, low, high) for count in range(top + 1)}
        for place in reversed(range(len(properties))):
            name, sub = properties[place]
            rules: dict[int, str | None] = {}
            for count in range(min(place, top) + 1):
                options = []
                after = following[min(count + 1, top)] if high is None or count < high else None
                if after is not None:
                    comma = f"{COMMA} " if count else ""
                    options.append(f"{comma}{_key(name)} {COLON} {self._name(sub)} {after}")
                if name not in required and following[count] is not None:
                    options.append(following[count])
                rules[count] = self._writer.rule(self._writer.fresh("o"), *options) if options else None
            following = rules
        result = following[0]
        assert result is not None, f"{shape=}"
        return result

    def _end(self, pairs: str | None, count: int, low: int, high: int | None) -> str | None:
        """What may follow behind all declared properties; None: nothing could make this valid."""
        missing = max(low - count, 0)
        room = None if high is None else high - count
        if room is not None and (room < 0 or missing > room):
            return None
        if pairs is None or room == 0:
            return None if missing else '""'
        if missing > 1:
            return None
        following = f"({COMMA} {pairs})"
        if count:
            return self._writer.rule(self._writer.fresh("o"), repeated(following, missing, room))
        more = repeated(following, 0, None if room is None else room - 1)
        return self._writer.rule(self._writer.fresh("o"), *['""'] * (missing == 0), f"{pairs} {more}")

    def _undeclared(self, shape: Object) -> str | None:
        """A rule for one undeclared property."""
        options = []
        for keys, sub in self._reach.keys[shape]:
            if sub in self._reach.finite:
                key = "text" if keys is None else self._writer.automaton(keys, json=True)
                options.append(f'"\\"" {key} {COLON} {self._name(sub)}')
        return self._writer.rule(self._writer.fresh("p"), *options) if options else None


def _key(name: str) -> str:
    return literal(f'"{escaped(name)}"')
