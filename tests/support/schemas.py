"""JSON schemas for tests of structured output: real-looking ones by hand, others from a seeded generator.

Every schema bounds its output (string lengths, item counts, chances of recursion), so that a model which
picks tokens at random comes to an end.
"""

from __future__ import annotations

import json
import random
from typing import Any

from tests.support.paths import DATA

Schema = dict[str, Any]

GENERATED = 270
FORMATS = ("date", "time", "date-time", "uuid", "ipv4", "email", "duration")


def all_schemas() -> list[tuple[str, Schema]]:
    """(name, schema) pairs, always the same ones in the same order; names are unique."""
    return hand_written() + [(f"generated-{seed:03d}", generate(seed)) for seed in range(GENERATED)]


def hand_written() -> list[tuple[str, Schema]]:
    """(name, schema) pairs in the manner of real applications."""
    return list(json.loads((DATA / "structured_output" / "schemas.json").read_text()).items())


def generate(seed: int) -> Schema:
    """The schema of a seed."""
    rng = random.Random(f"schema {seed}")
    schema = _object(rng, 3) if rng.random() < 0.5 else _value(rng, 3)
    if rng.random() < 0.2:
        schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": f"T{seed}"} | schema
    return schema


def _value(rng: random.Random, depth: int) -> Schema:
    makers = [_string, _string, _integer, _number, _enum, _const, _plain, _union_of_types]
    if depth > 0:
        makers += [_array, _array, _tuple, _object, _object, _record, _any_of, _one_of, _all_of, _ref]
    return rng.choice(makers)(rng, depth)


def _plain(rng: random.Random, depth: int) -> Schema:
    return {"type": rng.choice(["boolean", "null"])}


def _string(rng: random.Random, depth: int) -> Schema:
    match rng.randrange(5):
        case 0:
            return {"type": "string", "format": rng.choice(FORMATS)}
        case 1:
            return {"type": "string", "pattern": rng.choice(PATTERNS)}
        case 2:
            low = rng.randrange(4)
            pattern = rng.choice(["^[a-z]*$", "^(ab|c)+$", "^\\d*[x-z]?$", "^[^0-9]*$", "^é?[à-ü]*$"])
            return {
                "type": "string",
                "pattern": pattern,
                "minLength": low,
                "maxLength": low + rng.randrange(6),
            }
        case 3:
            low = rng.randrange(4)
            return {"type": "string", "minLength": low, "maxLength": low + rng.randrange(8)}
        case _:
            return {"type": "string", "maxLength": rng.randrange(12)}


PATTERNS = (
    "^[A-Z]{2}-[0-9]{3}$",
    "^(red|green|blue)$",
    "^a?b{1,3}c?$",
    "^\\+?[1-9]\\d{1,9}$",
    "^[a-z][a-z0-9_]{0,8}$",
    '^"[^"]{0,3}"$',
    "^\\\\{1,2}[nt]$",
    "^[äöü]{1,3}ß?$",
    "^(?:[01]\\d|2[0-3]):[0-5]\\d$",
    "^.{0,4}$",
    "^[^\\s/]{1,6}/[a-z0-9_.-]{1,6}$",
    "^$",
    "^v\\d+\\.\\d{1,2}(-(alpha|beta))?$",
    "^[\\u4e00-\\u4e10]{1,2}$",
    "^x$|^y{2}$",
)


def _bounds(rng: random.Random, low: int, high: int, step: float) -> Schema:
    a, b = sorted((rng.randint(low, high), rng.randint(low, high)))
    bounds: Schema = {}
    if rng.random() < 0.8:
        bounds[rng.choice(["minimum", "exclusiveMinimum"])] = a * step
    if rng.random() < 0.8:
        bounds[rng.choice(["maximum", "exclusiveMaximum"])] = (b + 2) * step
    return bounds


def _integer(rng: random.Random, depth: int) -> Schema:
    scale = rng.choice([9, 100, 12345])
    schema = {"type": "integer"} | _bounds(rng, -scale, scale, 1)
    if rng.random() < 0.3:
        schema = {"type": "integer", "minimum": -scale, "maximum": 3 * scale, "multipleOf": rng.randint(2, 9)}
    return schema


def _number(rng: random.Random, depth: int) -> Schema:
    return {"type": "number"} | _bounds(rng, -40, 400, rng.choice([1, 0.5, 0.25, 10]))


SCALARS = (
    None,
    True,
    False,
    0,
    -1,
    7,
    1.5,
    100,
    "",
    "a",
    "é",
    "日本",
    'q"uote',
    "back\\slash",
    "tab\t",
    "😀",
)


def _const(rng: random.Random, depth: int) -> Schema:
    value = rng.choice([*SCALARS, [], {}, [1, "x"], {"k": None}, {"ü": [True, {"z": 0}]}])
    return {"const": value}


def _enum(rng: random.Random, depth: int) -> Schema:
    if rng.random() < 0.5:
        return {"type": "string", "enum": rng.sample(["on", "off", "auto", "o", "grün", "a b", "\n"], 3)}
    return {"enum": [*rng.sample(SCALARS[3:], 3), rng.choice([None, [0], {"a": 1}])]}


def _union_of_types(rng: random.Random, depth: int) -> Schema:
    kinds = rng.sample(["string", "integer", "boolean", "null", "number"], rng.randint(2, 3))
    schema: Schema = {"type": kinds}
    if "string" in kinds:
        schema["maxLength"] = rng.randrange(6)
    if {"integer", "number"} & set(kinds):
        schema["minimum"] = rng.randint(-5, 5)
    return schema


def _array(rng: random.Random, depth: int) -> Schema:
    low = rng.choice([0, 0, 1, 2])
    schema: Schema = {"type": "array", "items": _value(rng, depth - 1), "maxItems": low + rng.randrange(3)}
    if low:
        schema["minItems"] = low
    if rng.random() < 0.15:
        values = rng.sample(["r", "w", "x", 1, None], 3)
        schema = {"type": "array", "items": {"enum": values}, "uniqueItems": True}
    return schema


def _tuple(rng: random.Random, depth: int) -> Schema:
    count = rng.randint(1, 3)
    schema: Schema = {"type": "array", "prefixItems": [_value(rng, depth - 1) for _ in range(count)]}
    match rng.randrange(3):
        case 0:
            schema["items"] = False
        case 1:
            schema |= {"items": _value(rng, 0), "maxItems": count + 1}
    if rng.random() < 0.6:
        schema["minItems"] = rng.randint(0, count)
    return schema


NAMES = ("id", "name", "value", "is_open", "größe", "a b", 'k"', "日付", "x", "x1", "")


def _object(rng: random.Random, depth: int) -> Schema:
    names = rng.sample(NAMES, rng.randint(1, 4))
    schema: Schema = {"type": "object", "properties": {name: _value(rng, depth - 1) for name in names}}
    if rng.random() < 0.8:
        schema["required"] = rng.sample(names, rng.randint(0, len(names)))
    if rng.random() < 0.5:
        schema["additionalProperties"] = False
        if rng.random() < 0.3:
            required = len(schema.get("required", ()))
            schema["minProperties"] = rng.randint(0, len(names))
            schema["maxProperties"] = rng.randint(max(required, schema["minProperties"]), len(names))
    if rng.random() < 0.15 and len(names) > 1:
        schema["dependentRequired"] = {names[0]: [names[1]]}
    if rng.random() < 0.3:
        schema["description"] = "generated"
    return schema


def _record(rng: random.Random, depth: int) -> Schema:
    """An object with open keys."""
    schema: Schema = {
        "type": "object",
        "additionalProperties": _value(rng, depth - 1),
        "propertyNames": rng.choice(
            [{"maxLength": 5}, {"pattern": "^[a-z]{1,4}$"}, {"enum": ["p", "q", "r"]}]
        ),
        "maxProperties": rng.randint(1, 3),
    }
    match rng.randrange(3):
        case 0:
            schema |= {"properties": {"x": {"type": "boolean"}}, "required": ["x"]}
            if "enum" in schema["propertyNames"]:
                schema["propertyNames"] = {"maxLength": 3}
        case 1:
            schema["minProperties"] = 1
        case _:
            del schema["additionalProperties"], schema["propertyNames"]
            schema |= {
                "patternProperties": {"^n_[a-c]{1,2}$": _integer(rng, 0), "^s[0-9]$": _string(rng, 0)},
                "additionalProperties": False,
            }
    return schema


def _any_of(rng: random.Random, depth: int) -> Schema:
    return {"anyOf": [_value(rng, depth - 1) for _ in range(rng.randint(2, 3))]}


def _one_of(rng: random.Random, depth: int) -> Schema:
    if rng.random() < 0.5:
        return {"oneOf": [_string(rng, 0), {"type": "integer"} | _bounds(rng, -9, 9, 1), {"type": "null"}]}
    branches = [
        {"type": "object", "properties": {"kind": {"const": kind}, "v": _value(rng, depth - 1)},
         "required": ["kind"], "additionalProperties": False}
        for kind in rng.sample(["circle", "square", "dot"], 2)
    ]  # fmt: skip
    return {"oneOf": branches}


def _all_of(rng: random.Random, depth: int) -> Schema:
    match rng.randrange(3):
        case 0:
            return {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 90}], "multipleOf": 3}
        case 1:
            return {
                "type": "string",
                "allOf": [{"pattern": "^[a-z]"}, {"pattern": "[0-9]$"}, {"maxLength": 5}],
            }
        case _:
            return {
                "allOf": [
                    {"type": "object", "properties": {"id": {"type": "integer"}}, "required": ["id"]},
                    {"properties": {"note": _value(rng, depth - 1), "id": {"minimum": 0}}},
                ]
            }


def _ref(rng: random.Random, depth: int) -> Schema:
    schema = {"$ref": "#/$defs/item", "$defs": {"item": _value(rng, depth - 1)}}
    return schema if depth == 3 else schema["$defs"]["item"]
