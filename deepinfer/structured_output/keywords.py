"""Which JSON-Schema keywords exist, what their values look like, and which of them cannot be enforced."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterator
from typing import Any

from deepinfer.structured_output.errors import SchemaError

MAX_DEPTH = 100  # of schemas inside schemas
MAX_SCHEMAS = 20_000  # in one document
TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")

ANNOTATIONS = frozenset(
    "$comment $id $schema title description default example examples deprecated readOnly writeOnly "
    "discriminator externalDocs xml".split()
)
"""Say nothing about an output; `$id` and `$schema` only at the root."""

REFUSED = {
    "not": "cannot be enforced: list what is allowed instead, with enum, pattern or anyOf",
    "if": "cannot be enforced: use anyOf with one branch for each case",
    "then": "cannot be enforced: use anyOf with one branch for each case",
    "else": "cannot be enforced: use anyOf with one branch for each case",
    "contains": "cannot be enforced: put the wanted item first with prefixItems",
    "minContains": "cannot be enforced: put the wanted items first with prefixItems",
    "maxContains": "cannot be enforced: bound the array with maxItems",
    "$dynamicRef": "is not supported: use $ref",
    "$dynamicAnchor": "is not supported: use $defs and $ref",
    "$recursiveRef": "is not supported: use $ref",
    "$recursiveAnchor": "is not supported: use $defs and $ref",
    "$anchor": "is not supported: use $defs and $ref",
    "$vocabulary": "is not supported",
    "id": "is not supported: leave it out, and refer to schemas by their place with $ref",
    "additionalItems": "belongs to older drafts: use prefixItems for the first items, items for the others",
    "dependencies": "belongs to older drafts: use dependentRequired or dependentSchemas",
    "nullable": 'is not JSON Schema: use "type": [..., "null"]',
    "contentEncoding": "cannot be enforced: use pattern",
    "contentMediaType": "cannot be enforced: describe the content with a schema of its own",
    "contentSchema": "cannot be enforced: describe the content with a schema of its own",
}


def children(schema: Any, path: str) -> Iterator[tuple[str, Any]]:
    """(path, schema) of the schemas directly inside one."""
    if not isinstance(schema, dict):
        return
    for keyword, value in schema.items():
        here = f"{path}/{escape(keyword)}"
        if keyword in _ONE:
            yield here, value
        elif keyword in _LISTS:
            yield from ((f"{here}/{place}", child) for place, child in enumerate(value))
        elif keyword in _MAPS:
            yield from ((f"{here}/{escape(name)}", child) for name, child in value.items())


def check(root: Any) -> dict[str, Any]:
    """Every schema of a document by its path, "#" being the root; `$ref` is not followed.

    Raises:
        SchemaError: a keyword that is unknown, has a value of the wrong kind or cannot be enforced.
    """
    found: dict[str, Any] = {}
    todo = [("#", root, 0)]
    while todo:
        path, schema, depth = todo.pop()
        if depth > MAX_DEPTH:
            raise SchemaError(path, f"schemas are nested too deeply: at most {MAX_DEPTH} levels")
        if len(found) >= MAX_SCHEMAS:
            raise SchemaError(path, f"the document holds too many schemas: at most {MAX_SCHEMAS}")
        _check_one(schema, path)
        found[path] = schema
        todo.extend((where, child, depth + 1) for where, child in children(schema, path))
    return found


def escape(name: str) -> str:
    """A name as a part of a JSON pointer."""
    return name.replace("~", "~0").replace("/", "~1")


def _check_one(schema: Any, path: str) -> None:
    if isinstance(schema, bool):
        return
    if not isinstance(schema, dict):
        raise SchemaError(path, f"a schema is an object or a boolean, got {_shown(schema)}")
    for keyword, value in schema.items():
        here = f"{path}/{escape(keyword)}"
        if keyword in REFUSED:
            raise SchemaError(here, f"{keyword!r} {REFUSED[keyword]}")
        if keyword in ANNOTATIONS or keyword.startswith("x-"):
            if keyword in ("$id", "$schema") and path != "#":
                raise SchemaError(here, f"{keyword!r} is supported at the root only")
            if keyword == "$schema":
                _check_draft(value, here)
        elif keyword in _VALUES:
            _VALUES[keyword](value, here)
        else:
            near = difflib.get_close_matches(keyword, [*_VALUES, *REFUSED, *ANNOTATIONS], n=1)
            hint = f": did you mean {near[0]!r}?" if near else ""
            raise SchemaError(here, f"{keyword!r} is not a keyword that can be enforced{hint}")
    if "$id" in schema and "#" in str(schema["$id"]):
        raise SchemaError(f"{path}/$id", "an $id has no fragment")


_DRAFTS = ("draft-06", "draft-07", "2019-09", "2020-12")


def _check_draft(value: Any, path: str) -> None:
    if not (isinstance(value, str) and "json-schema.org/" in value and any(d in value for d in _DRAFTS)):
        raise SchemaError(
            path, f"the dialect {_shown(value)} is not supported: drafts {', '.join(_DRAFTS)} are"
        )


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _wrong(path: str, wanted: str, value: Any) -> SchemaError:
    return SchemaError(path, f"must be {wanted}, got {_shown(value)}")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _number(value: Any, path: str) -> None:
    if not _is_number(value) or not math.isfinite(value):
        raise _wrong(path, "a number", value)


def _positive(value: Any, path: str) -> None:
    if not _is_number(value) or not value > 0 or not math.isfinite(value):
        raise _wrong(path, "a number above 0", value)


def _count(value: Any, path: str) -> None:
    if not _is_number(value) or value < 0 or not math.isfinite(value) or value != int(value):
        raise _wrong(path, "an integer of at least 0", value)


def _text(value: Any, path: str) -> None:
    if not isinstance(value, str):
        raise _wrong(path, "a string", value)


def _flag(value: Any, path: str) -> None:
    if not isinstance(value, bool):
        raise _wrong(path, "true or false", value)


def _type(value: Any, path: str) -> None:
    names = value if isinstance(value, list) else [value]
    if not names or not all(isinstance(name, str) and name in TYPES for name in names):
        raise _wrong(path, f"one or several of {', '.join(TYPES)}", value)
    if len(set(names)) < len(names):
        raise _wrong(path, "a list without repeats", value)


def _values(value: Any, path: str) -> None:
    if not isinstance(value, list) or not value:
        raise _wrong(path, "a non-empty list of values", value)


def _anything(value: Any, path: str) -> None:
    pass


def _names(value: Any, path: str) -> None:
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise _wrong(path, "a list of names", value)
    if len(set(value)) < len(value):
        raise _wrong(path, "a list without repeats", value)


def _names_by_name(value: Any, path: str) -> None:
    if not isinstance(value, dict):
        raise _wrong(path, "an object of lists of names", value)
    for name, names in value.items():
        _names(names, f"{path}/{escape(name)}")


def _schema(value: Any, path: str) -> None:
    if isinstance(value, list):
        raise SchemaError(path, "a list of schemas is called prefixItems since draft 2020-12: rename it")
    if not isinstance(value, (dict, bool)):
        raise _wrong(path, "a schema", value)


def _no_or_anything(value: Any, path: str) -> None:
    if not isinstance(value, bool):
        raise SchemaError(path, "only true and false can be enforced: use additionalProperties or items")


def _schemas(value: Any, path: str) -> None:
    if not isinstance(value, list) or not value:
        raise _wrong(path, "a non-empty list of schemas", value)


def _schemas_by_name(value: Any, path: str) -> None:
    if not isinstance(value, dict):
        raise _wrong(path, "an object of schemas", value)


_ONE = ("items", "additionalProperties", "propertyNames")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_MAPS = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")

_VALUES: dict[str, Callable[[Any, str], None]] = {
    "type": _type,
    "enum": _values,
    "const": _anything,
    "$ref": _text,
    "pattern": _text,
    "format": _text,
    "uniqueItems": _flag,
    "required": _names,
    "dependentRequired": _names_by_name,
    "multipleOf": _positive,
    "unevaluatedProperties": _no_or_anything,
    "unevaluatedItems": _no_or_anything,
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), _number),
    **dict.fromkeys(
        ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"), _count
    ),
    **dict.fromkeys(_ONE, _schema),
    **dict.fromkeys(_LISTS, _schemas),
    **dict.fromkeys(_MAPS, _schemas_by_name),
}
