"""Turns a JSON schema into shapes: references followed, combinations multiplied out, nothing left out.

A schema becomes a list of shapes, any of which a value may have. `anyOf` adds lists up, `allOf`, `$ref` and
plain keywords next to them are intersected shape by shape.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from decimal import Decimal
from typing import Any
from urllib.parse import unquote

from deepinfer.structured_output import keywords
from deepinfer.structured_output.errors import GrammarError, SchemaError
from deepinfer.structured_output.formats import FORMATS, NUMBER_FORMATS
from deepinfer.structured_output.meet import Meeting
from deepinfer.structured_output.numeric import MAX_MULTIPLE, Bounds
from deepinfer.structured_output.regex import within
from deepinfer.structured_output.shapes import (
    ANY,
    NEVER,
    Array,
    Number,
    Object,
    Shape,
    String,
    Sub,
    const,
    joined,
    key_of,
)

MAX_LENGTH = 1_000_000  # of minLength and maxLength
MAX_ITEMS = 100_000  # of minItems and maxItems
MAX_SHAPES = 20_000  # of one schema
MAX_REFERENCES = 100  # in a row
MAX_DEPENDENCIES = 6  # of one schema: each doubles its shapes

TRUE, FALSE, NULL = const(True), const(False), const(None)


class Document:
    """A checked schema document.

    Raises (also from its methods):
        SchemaError: a schema that is invalid, impossible to enforce or too large.
    """

    def __init__(self, root: Any) -> None:
        self._schemas = keywords.check(root)
        self._root = root
        self._known: dict[Sub, tuple[Shape, ...]] = {}
        self._open: list[str] = []  # being read right now
        self._meeting = Meeting(self.shapes)

    def shapes(self, sub: Sub) -> tuple[Shape, ...]:
        """What a value may look like to which all schemas of `sub` apply; empty: no value fits."""
        if sub not in self._known:
            found: tuple[Shape, ...] = _everything("#")
            for place, path in enumerate(sub):
                own = () if path in NEVER else self._read(path)
                found = own if place == 0 else self._meet(found, own, path)
            self._known[sub] = found
        return self._known[sub]

    def admits(self, sub: Sub, value: Any) -> bool:
        """Whether a value fits."""
        return self._meeting.admits(sub, value)

    def _meet(self, a: Iterable[Shape], b: Iterable[Shape], path: str) -> tuple[Shape, ...]:
        return self._limited(self._meeting.all_pairs(tuple(a), tuple(b), path), path)

    def _limited(self, shapes: Iterable[Shape], path: str) -> tuple[Shape, ...]:
        shapes = tuple(dict.fromkeys(shapes))
        if len(shapes) > MAX_SHAPES:
            raise SchemaError(path, f"has {len(shapes)} alternatives: at most {MAX_SHAPES} can be enforced")
        return shapes

    def _read(self, path: str) -> tuple[Shape, ...]:
        """The shapes of one schema."""
        alone = (path,)
        if alone in self._known:
            return self._known[alone]
        if path in self._open:
            raise SchemaError(
                path, "refers to itself without anything around: no value could ever be written"
            )
        if len(self._open) >= MAX_REFERENCES:
            raise SchemaError(path, f"more than {MAX_REFERENCES} references and combinations in a row")
        self._open.append(path)
        try:
            self._known[alone] = self._limited(self._combined(self._schemas[path], path), path)
        finally:
            self._open.pop()
        return self._known[alone]

    def _combined(self, schema: Any, path: str) -> Iterable[Shape]:
        if isinstance(schema, bool):
            return _everything(path) if schema else ()
        shapes = self._plain(schema, path)
        if "$ref" in schema:
            shapes = self._meet(shapes, self._read(self._target(schema["$ref"], f"{path}/$ref")), path)
        for place in range(len(schema.get("allOf", ()))):
            where = f"{path}/allOf/{place}"
            shapes = self._meet(shapes, self._read(where), where)
        for keyword in ("anyOf", "oneOf"):
            if keyword not in schema:
                continue
            branches = [self._read(f"{path}/{keyword}/{place}") for place in range(len(schema[keyword]))]
            if keyword == "oneOf":
                for place, other in self._meeting.overlaps(branches, shapes, f"{path}/oneOf"):
                    raise SchemaError(
                        f"{path}/oneOf/{place}",
                        f"may hold together with {path}/oneOf/{other}, which oneOf rules out and nothing can "
                        "prevent: tell them apart by type or by a required constant, or use anyOf",
                    )
            shapes = self._meet(shapes, dict.fromkeys(s for branch in branches for s in branch), path)
        shapes = self._with_dependents(schema, path, shapes)
        if schema.get("unevaluatedProperties") is False or schema.get("unevaluatedItems") is False:
            shapes = [_closed(shape, schema) for shape in shapes]
        return shapes

    def _with_dependents(self, schema: dict, path: str, shapes: Iterable[Shape]) -> Iterable[Shape]:
        required, schemas = schema.get("dependentRequired", {}), schema.get("dependentSchemas", {})
        if len(required) + len(schemas) > MAX_DEPENDENCIES:
            raise SchemaError(
                f"{path}/{'dependentRequired' if required else 'dependentSchemas'}",
                f"{len(required) + len(schemas)} dependencies: at most {MAX_DEPENDENCIES} can be enforced",
            )
        others = tuple(s for s in _everything(path) if not isinstance(s, Object))
        for name, names in required.items():
            cases = (*others, *_without(name, path), Object(required=(name, *names), path=path))
            shapes = self._meet(shapes, cases, path)
        for name in schemas:
            where = f"{path}/dependentSchemas/{keywords.escape(name)}"
            present = self._meet((Object(required=(name,), path=path),), self._read(where), where)
            shapes = self._meet(shapes, (*others, *_without(name, path), *present), path)
        return shapes

    def _target(self, reference: str, path: str) -> str:
        """The path that a `$ref` leads to."""
        base, _, fragment = reference.partition("#")
        own = self._root.get("$id") if isinstance(self._root, dict) else None
        if base and base != own:
            raise SchemaError(path, f"{reference!r} leads outside of the document: only #/... is followed")
        if fragment and not fragment.startswith("/"):
            raise SchemaError(path, f"{reference!r} names an anchor: give the place, as in #/$defs/name")
        parts = unquote(fragment).split("/")[1:]
        names = [part.replace("~1", "/").replace("~0", "~") for part in parts]
        target = "/".join(["#", *(keywords.escape(name) for name in names)])
        if target not in self._schemas:
            raise SchemaError(path, f"{reference!r} leads to no schema of this document")
        return target

    # --- keywords of one schema, without combinations ---------------------------------------------------

    def _plain(self, schema: dict, path: str) -> Iterable[Shape]:
        kinds = _kinds(schema)
        shapes: list[Shape] = []
        if "null" in kinds:
            shapes.append(NULL)
        if "boolean" in kinds:
            shapes += [TRUE, FALSE]
        if kinds & {"integer", "number"}:
            shapes += _number(schema, path, whole="number" not in kinds)
        if "string" in kinds:
            shapes.append(_string(schema, path))
        if "array" in kinds:
            shapes.append(_array(schema, path))
        if "object" in kinds:
            shapes.append(_object(schema, path))
        if "format" in schema and not kinds & {"integer", "number"}:
            _check_format(schema["format"], f"{path}/format", FORMATS)
        for keyword in ("const", "enum"):
            if keyword in schema:
                values = [schema["const"]] if keyword == "const" else schema["enum"]
                unique = {key_of(value): const(value) for value in values}
                shapes = list(self._meet(shapes, unique.values(), f"{path}/{keyword}"))
        return shapes


def _everything(path: str) -> tuple[Shape, ...]:
    return (NULL, TRUE, FALSE, Number(path=path), String(path=path), Array(path=path), Object(path=path))


def _without(name: str, path: str) -> tuple[Shape, ...]:
    return (Object(properties=((name, NEVER),), path=path),)


def _closed(shape: Shape, schema: dict) -> Shape:
    """The shape with nothing more than what it declares."""
    if isinstance(shape, Object) and not shape.explicit and schema.get("unevaluatedProperties") is False:
        return replace(shape, additional=NEVER, explicit=True)
    if isinstance(shape, Array) and not shape.explicit and schema.get("unevaluatedItems") is False:
        return replace(shape, rest=NEVER, explicit=True)
    return shape


def _count(schema: dict, low: str, high: str, path: str, most: int) -> tuple[int, int | None]:
    for name in (low, high):
        if schema.get(name, 0) > most:
            raise SchemaError(f"{path}/{name}", f"is {schema[name]}: at most {most} can be enforced")
    return int(schema.get(low, 0)), int(schema[high]) if high in schema else None


def _exact(value: float) -> Decimal:
    """A bound as a decimal: whole doubles by their value, others by their shortest text."""
    return Decimal(int(value)) if value == int(value) else Decimal(repr(value))


def _number(schema: dict, path: str, whole: bool) -> list[Shape]:
    bounds = Bounds()
    if "minimum" in schema:
        bounds &= Bounds(low=_exact(schema["minimum"]))
    if "exclusiveMinimum" in schema:
        bounds &= Bounds(low=_exact(schema["exclusiveMinimum"]), low_strict=True)
    if "maximum" in schema:
        bounds &= Bounds(high=_exact(schema["maximum"]))
    if "exclusiveMaximum" in schema:
        bounds &= Bounds(high=_exact(schema["exclusiveMaximum"]), high_strict=True)
    step = 1 if whole else 0
    if "multipleOf" in schema:
        value = schema["multipleOf"]
        if value != int(value) or value > MAX_MULTIPLE:
            raise SchemaError(
                f"{path}/multipleOf", f"is {value}: whole numbers up to {MAX_MULTIPLE} can be enforced"
            )
        step = math.lcm(step or 1, int(value))
    if "format" in schema:
        known = FORMATS if "string" in _kinds(schema) else {}
        _check_format(schema["format"], f"{path}/format", known | NUMBER_FORMATS)
        limit = NUMBER_FORMATS.get(schema["format"])
        if limit is not None:
            bounds &= Bounds(low=Decimal(-limit), high=Decimal(limit - 1))
    return [Number(bounds, step, path)]


def _kinds(schema: dict) -> set[str]:
    kinds = schema.get("type", keywords.TYPES)
    return {kinds} if isinstance(kinds, str) else set(kinds)


def _check_format(name: str, path: str, known: dict) -> None:
    if name not in known:
        raise SchemaError(path, f"{name!r} cannot be enforced: {', '.join(known)} can; or use pattern")


def _string(schema: dict, path: str) -> String:
    low, high = _count(schema, "minLength", "maxLength", path, MAX_LENGTH)
    patterns = formats = ()
    if "pattern" in schema:
        where = f"{path}/pattern"
        _check_pattern(schema["pattern"], where)
        patterns = ((where, schema["pattern"]),)
    if schema.get("format") in FORMATS:
        formats = ((f"{path}/format", schema["format"]),)
    return String(low, high, patterns, formats, path)


def _check_pattern(pattern: str, path: str) -> None:
    try:
        within(pattern)
    except GrammarError as error:
        raise SchemaError(path, str(error)) from None


def _array(schema: dict, path: str) -> Array:
    low, high = _count(schema, "minItems", "maxItems", path, MAX_ITEMS)
    prefix = tuple((f"{path}/prefixItems/{place}",) for place in range(len(schema.get("prefixItems", ()))))
    rest = (f"{path}/items",) if "items" in schema else ANY
    return Array(prefix, rest, "items" in schema, low, high, schema.get("uniqueItems", False), path)


def _object(schema: dict, path: str) -> Object:
    low, high = _count(schema, "minProperties", "maxProperties", path, MAX_ITEMS)
    patterns = []
    for pattern in schema.get("patternProperties", {}):
        where = f"{path}/patternProperties/{keywords.escape(pattern)}"
        _check_pattern(pattern, where)
        patterns.append((where, pattern, (where,)))
    base = Object(patterns=tuple(patterns))
    properties = tuple(
        (name, joined((f"{path}/properties/{keywords.escape(name)}",), Meeting.matching(base, name)))
        for name in schema.get("properties", {})
    )
    return Object(
        properties=properties,
        required=tuple(schema.get("required", ())),
        patterns=tuple(patterns),
        additional=(f"{path}/additionalProperties",) if "additionalProperties" in schema else ANY,
        explicit="additionalProperties" in schema,
        declared="properties" in schema or "patternProperties" in schema,
        names=(f"{path}/propertyNames",) if "propertyNames" in schema else ANY,
        low=low,
        high=high,
        path=path,
    )
