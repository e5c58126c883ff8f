"""Values for JSON schemas: valid ones by construction, others by mutation.

Independent of the code under test.
"""

from __future__ import annotations

import copy
import json
import random
from typing import Any

from tests.support.judge import Judge, Schema, below, expanded, items_at
from tests.support.texts import ALPHABET, FORMATS, sample

PLAIN = "".join(c for c in ALPHABET if c >= " " and c not in '"\\')


class NoValue(Exception):
    """No value was found for a schema."""


def valid_instance(judge: Judge, rng: random.Random) -> Any:
    """A value that has to be accepted.

    Raises:
        NoValue: none was found in many attempts.
    """
    for _ in range(60):
        try:
            value = _make(judge, [judge.schema], rng, 0)
        except (NoValue, RecursionError):
            continue
        if judge.generated(value):
            return value
    raise NoValue


def _make(judge: Judge, schemas: list[Schema], rng: random.Random, depth: int) -> Any:
    if False in schemas or depth > 12:
        raise NoValue
    plain = expanded(judge, schemas, lambda branches: _branch(branches, rng, depth))
    fixed = [s["enum"] for s in plain if "enum" in s] + [[s["const"]] for s in plain if "const" in s]
    if fixed:
        return copy.deepcopy(rng.choice(fixed[0]))
    kinds = {"null", "boolean", "number", "integer", "string", "array", "object"}
    for schema in plain:
        if "type" in schema:
            own = {schema["type"]} if isinstance(schema["type"], str) else set(schema["type"])
            kinds &= own | ({"integer"} if "number" in own else set())
    if not kinds:
        raise NoValue
    match rng.choice(sorted(kinds)):
        case "null":
            return None
        case "boolean":
            return rng.random() < 0.5
        case "integer":
            return _make_number(plain, rng, whole=True)
        case "number":
            return _make_number(plain, rng, whole=False)
        case "string":
            return _make_string(plain, rng)
        case "array":
            return _make_array(judge, plain, rng, depth)
    return _make_object(judge, plain, rng, depth)


def _branch(branches: list[Schema], rng: random.Random, depth: int) -> Schema:
    if depth > 4:  # come to an end
        simple = [
            b for b in branches if isinstance(b, dict) and "$ref" not in b and b.get("type") != "object"
        ]
        return rng.choice(simple or branches)
    return rng.choice(branches)


def _limits(plain: list[dict], low: str, high: str, span: int) -> tuple[int, int]:
    least = max((s[low] for s in plain if low in s), default=0)
    most = min((s[high] for s in plain if high in s), default=least + span)
    if most < least:
        raise NoValue
    return int(least), int(most)


def _make_number(plain: list[dict], rng: random.Random, whole: bool) -> float:
    lows = [s[k] for s in plain for k in ("minimum", "exclusiveMinimum") if k in s]
    highs = [s[k] for s in plain for k in ("maximum", "exclusiveMaximum") if k in s]
    low = max(lows, default=min(highs, default=0) - 1000)
    high = min(highs, default=low + rng.choice([10, 1000, 10**9]))
    if any("multipleOf" in s for s in plain):
        step = next(s["multipleOf"] for s in plain if "multipleOf" in s)
        return rng.randint(int(low // step), int(high // step)) * step
    if whole:
        return rng.randint(int(low), int(max(high, low)))
    return rng.choice(
        [low, high, round(rng.uniform(low, high), rng.randint(1, 6)), round(rng.uniform(low, high))]
    )


def _make_string(plain: list[dict], rng: random.Random) -> str:
    low, high = _limits(plain, "minLength", "maxLength", 8)
    formats = [s["format"] for s in plain if s.get("format") in FORMATS]
    patterns = [s["pattern"] for s in plain if "pattern" in s]
    for _ in range(200):
        if formats:
            value = FORMATS[formats[0]](rng)
        elif patterns:
            value = sample(rng.choice(patterns), rng)
        else:
            pool = PLAIN if any("maxLength" in s for s in plain) else ALPHABET
            value = "".join(rng.choice(pool) for _ in range(rng.randint(low, high)))
        if low <= len(value) <= high or (formats and not any("maxLength" in s for s in plain)):
            return value
        if patterns and not any("maxLength" in s or "minLength" in s for s in plain):
            return value
    raise NoValue


def _make_array(judge: Judge, plain: list[dict], rng: random.Random, depth: int) -> list:
    low, high = _limits(plain, "minItems", "maxItems", 3)
    if depth > 6:
        high = low
    prefix = max((len(s.get("prefixItems", [])) for s in plain), default=0)
    if any("prefixItems" in s and s.get("items", False) is False for s in plain):
        high = min(high, prefix)
    value = [
        _make(judge, items_at(plain, i), rng, depth + 1) for i in range(rng.randint(min(low, high), high))
    ]
    if any(s.get("uniqueItems") for s in plain):
        value = list({json.dumps(item): item for item in value}.values())
    return value


def _make_object(judge: Judge, plain: list[dict], rng: random.Random, depth: int) -> dict:
    names = list(dict.fromkeys(name for s in plain for name in s.get("properties", {})))
    required = {name for s in plain for name in s.get("required", ())}
    share = 0.1 if depth > 5 else rng.choice([0.0, 0.5, 0.9])
    chosen = [n for n in names if n in required or rng.random() < share]
    chosen += [n for n in required if n not in names]
    _, high = _limits(plain, "minProperties", "maxProperties", 100)
    is_open = any(
        s.get("additionalProperties") not in (None, False) or "patternProperties" in s for s in plain
    )
    for _ in range(rng.randint(0, 3) if is_open else 0):
        if len(chosen) < high:
            keys = [s["propertyNames"] for s in plain if "propertyNames" in s]
            patterns = [key for s in plain for key in s.get("patternProperties", {})]
            name = (
                sample(rng.choice(patterns), rng)
                if patterns
                else _make(judge, [{"type": "string"}, *keys], rng, depth)
            )
            if name not in chosen and name not in names:
                chosen.append(name)
    value = {}
    for name in chosen:
        try:
            value[name] = _make(judge, below(plain, name), rng, depth + 1)
        except NoValue:
            if name in required:
                raise
    return value


# --- mutated values --------------------------------------------------------------------------------------

SCALARS = (
    None,
    True,
    False,
    0,
    1,
    -1,
    2,
    99,
    1000,
    1.5,
    -0.25,
    "",
    "a",
    "é",
    "A",
    "0",
    '"',
    "\n",
    [],
    {},
    [1],
    {"a": 1},
)


def mutated(value: Any, rng: random.Random) -> Any:
    """The value with a change somewhere."""
    value = copy.deepcopy(value)
    places = list(_places(value, ()))
    path = rng.choice(places)
    if not path:
        return _changed(value, rng)
    parent = value
    for step in path[:-1]:
        parent = parent[step]
    parent[path[-1]] = _changed(parent[path[-1]], rng)
    return value


def _places(value: Any, path: tuple) -> Any:
    yield path
    steps = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for step, child in steps:
        yield from _places(child, (*path, step))


def _changed(value: Any, rng: random.Random) -> Any:
    if rng.random() < 0.2:
        return copy.deepcopy(rng.choice(SCALARS))
    match value:
        case bool() | None:
            return rng.choice([None, True, False, "true", 0])
        case int():
            return value + rng.choice([1, -1, 2, 10, -10, 0.5, 1000, -2 * value])
        case float():
            changed = rng.choice([value + 0.125, -value, value * 3.3, round(value)])
            return int(changed) if changed == int(changed) else round(changed, 6)
        case str():
            place = rng.randint(0, len(value))
            return value[:place] + rng.choice(["", *ALPHABET]) + value[place + rng.randint(0, 1) :]
        case list():
            items = list(value)
            action = rng.randrange(3)
            if action == 0 and items:
                items.pop(rng.randrange(len(items)))
            elif action == 1 and items:
                items.append(copy.deepcopy(rng.choice(items)))
            else:
                items.insert(rng.randint(0, len(items)), copy.deepcopy(rng.choice(SCALARS)))
            return items
    result = dict(value)
    action = rng.randrange(3)
    if action == 0 and result:
        result.pop(rng.choice(list(result)))
    elif action == 1 and result:
        name = rng.choice(list(result))
        result[name + rng.choice(["x", "_", "é"])] = result.pop(name)
    else:
        result[rng.choice(["a", "zz", "id", "é", "k"])] = copy.deepcopy(rng.choice(SCALARS))
    return result
