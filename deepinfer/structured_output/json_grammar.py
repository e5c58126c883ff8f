"""Writes the grammar of the JSON texts that a schema admits.

Style of the texts: one way to write each value. A comma or colon may be followed by one space, there is no
other whitespace; properties come in the order of the schema, undeclared ones behind them; strings contain
characters as they are, escaped only where JSON demands it and then in the shortest form; numbers are written
as in `numeric`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from deepinfer.structured_output import automaton, numeric
from deepinfer.structured_output.automaton import Automaton
from deepinfer.structured_output.characters import EVERY
from deepinfer.structured_output.direct import direct, is_direct
from deepinfer.structured_output.document import Document
from deepinfer.structured_output.ebnf import PLAIN, Writer, class_of, escaped, literal, repeated
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
    const,
    joined,
)

MAX_SUBS = 5_000  # different combinations of schemas
MAX_REGIONS = 16  # sets of keys that patternProperties tell apart
MAX_UNIQUE = 6  # values of which an array may hold each once
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
    """Two passes: first all shapes are found and those without a finite text are dropped, then the others get
    their rules."""

    def __init__(self, document: Document) -> None:
        self._document = document
        self._shapes: dict[Sub, list[Shape]] = {}
        self._keys: dict[Object, list[tuple[Automaton | None, Sub]]] = {}
        self._find(("#",))
        self._finite: set[Sub] = set()
        self._drop_endless()
        self._writer = Writer()
        self._names: dict[object, str] = {}
        self._path = "#"

    def text(self) -> str:
        """The whole grammar."""
        if ("#",) not in self._finite:
            raise SchemaError("#", "no value satisfies this schema")
        writer = self._writer
        try:
            writer.rule("sp", '""', '" "')
            writer.rule("text", '"\\""', f"{writer.character(EVERY, json=True)} text")
            names = {sub: self._name(sub) for sub in self._shapes if sub in self._finite}
            for sub, name in names.items():
                options = [self._shape(shape) for shape in self._shapes[sub] if self._is_finite(shape)]
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

    # --- first pass -------------------------------------------------------------------------------------

    def _find(self, root: Sub) -> None:
        todo = [root]
        while todo:
            sub = todo.pop()
            if sub in self._shapes:
                continue
            if len(self._shapes) >= MAX_SUBS:
                raise SchemaError(
                    (sub or ("#",))[0],
                    f"more than {MAX_SUBS} combinations of schemas: simplify allOf and $ref",
                )
            shapes = [self._prepared(shape) for shape in self._document.shapes(sub)]
            self._shapes[sub] = shapes
            for shape in shapes:
                todo += reversed(list(self._children(shape)))

    def _prepared(self, shape: Shape) -> Shape:
        if isinstance(shape, Object):
            shape = self._with_named_keys(shape)
        shape = as_written(shape)
        if isinstance(shape, Object):
            self._keys[shape] = self._key_sets(shape)
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
            yield from (sub for _, sub in self._keys[shape])

    def _with_named_keys(self, shape: Object) -> Object:
        """Declares required names and, when only certain names are allowed, all of those; drops others."""
        properties = dict(shape.properties)
        for name in shape.required:
            properties.setdefault(name, Meeting.lookup(shape, name))
        additional, explicit = shape.additional, shape.explicit
        patterns = shape.patterns
        if shape.names != ANY:
            names = self._document.shapes(shape.names)
            if all(isinstance(name, Const) for name in names):
                for name in names:
                    if isinstance(name.value, str):
                        properties.setdefault(name.value, Meeting.lookup(shape, name.value))
                additional, explicit, patterns = NEVER, True, ()
            for name in properties:
                if not self._document.admits(shape.names, name):
                    properties[name] = NEVER
        return Object(
            tuple(properties.items()), shape.required, patterns, additional, explicit, shape.declared,
            shape.names, shape.low, shape.high, shape.path,
        )  # fmt: skip

    def _key_sets(self, shape: Object) -> list[tuple[Automaton | None, Sub]]:
        """Undeclared keys: sets of them and what applies to their values; None stands for any key."""
        if not shape.patterns and not self._document.shapes(shape.additional):
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
        return [(keys, sub) for keys, sub in sets if not keys.is_empty and self._document.shapes(sub)]

    def _strings(self, sub: Sub) -> Automaton:
        """All strings that a schema of keys admits."""
        shapes = self._document.shapes(sub)
        texts = [s.value for s in shapes if isinstance(s, Const) and isinstance(s.value, str)]
        none_of = automaton.of_texts(texts).complement()
        for shape in shapes:
            if isinstance(shape, String):
                none_of &= string_automaton(shape).complement()
        return none_of.complement()

    def _check_count(self, shape: Object) -> None:
        if self._keys[shape] and shape.low > len(shape.required) + 1:
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
            for sub, shapes in self._shapes.items():
                if sub not in self._finite and any(self._is_finite(shape) for shape in shapes):
                    self._finite.add(sub)
                    grown = True

    def _is_finite(self, shape: Shape) -> bool:
        match shape:
            case Number():
                return not _number_automaton(shape).is_empty
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
                if shape.unique and self._unique_values(shape) is not None:
                    return shape.low <= len(self._unique_values(shape) or ())
                needed = range(min(shape.low, len(shape.prefix) + 1))
                return all(shape.item(place) in self._finite for place in needed)
            case Object():
                low, high = shape.low, shape.high
                if not all(dict(shape.properties)[name] in self._finite for name in shape.required):
                    return False
                written = sum(sub in self._finite for _, sub in shape.properties)
                most = written + any(sub in self._finite for _, sub in self._keys[shape])
                return low <= most and (high is None or (len(shape.required) <= high and low <= high))
        return True

    # --- second pass ------------------------------------------------------------------------------------

    def _shape(self, shape: Shape) -> str:
        self._path = getattr(shape, "path", self._path)
        match shape:
            case Const():
                return self._constant(shape.value)
            case Number():
                return self._writer.automaton(_number_automaton(shape), json=False)
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
        name, count = "", len(shape.prefix)
        if shape.high is not None:
            count = min(count, shape.high)
        name = self._rest(shape, count)
        for place in reversed(range(count)):
            options = ['""'] if place >= shape.low else []
            if shape.prefix[place] in self._finite:
                options.append(f"{f'{COMMA} ' if place else ''}{self._name(shape.prefix[place])} {name}")
            name = self._writer.rule(self._writer.fresh("t"), *options)
        return name

    def _rest(self, shape: Array, count: int) -> str:
        """The items from place `count` on, all of the same kind."""
        high = None if shape.high is None else shape.high - count
        low = max(shape.low - count, 0)
        if high == 0 or shape.rest not in self._finite:
            return '""'
        item = self._name(shape.rest)
        following = f"({COMMA} {item})"
        if count:
            return repeated(following, low, high)
        more = repeated(following, max(low - 1, 0), None if high is None else high - 1)
        return self._writer.rule(self._writer.fresh("t"), *['""'] * (low == 0), f"{item} {more}")

    def _unique_values(self, shape: Array) -> list[Any] | None:
        """The values that items may have when these are few."""
        if shape.prefix:
            return None
        shapes = self._document.shapes(shape.rest)
        if len(shapes) > MAX_UNIQUE or not all(isinstance(item, Const) for item in shapes):
            return None
        return [item.value for item in shapes if isinstance(item, Const)]

    def _unique_items(self, shape: Array) -> str:
        values = self._unique_values(shape)
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
                    known = after in names
                    name = names.setdefault(after, names.get(after) or self._writer.fresh("u"))
                    if not known:
                        rule(after)
                    options.append(f"{f'{COMMA} ' if used else ''}{self._constant(value)} {name}")
            return self._writer.rule(names[used], *options)

        return rule(0)

    # --- objects ----------------------------------------------------------------------------------------

    def _object(self, shape: Object) -> str:
        """Rules from the last property to the first: what may follow when `count` are written so far.

        Counts stand for all larger ones as soon as neither bound can tell them apart.
        """
        properties = [(name, sub) for name, sub in shape.properties if sub in self._finite]
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
        for keys, sub in self._keys[shape]:
            if sub in self._finite:
                key = "text" if keys is None else self._writer.automaton(keys, json=True)
                options.append(f'"\\"" {key} {COLON} {self._name(sub)}')
        return self._writer.rule(self._writer.fresh("p"), *options) if options else None


def _key(name: str) -> str:
    return literal(f'"{escaped(name)}"')


def _number_automaton(shape: Number) -> Automaton:
    try:
        if not shape.step:
            return numeric.numbers(shape.bounds)
        found = numeric.integers(shape.bounds)
        return found if shape.step == 1 else found & numeric.multiples(shape.step)
    except GrammarError as error:
        raise SchemaError(shape.path, str(error)) from None
