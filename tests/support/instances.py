"""Values for JSON schemas: valid ones by construction, others by mutation, both judged by `jsonschema`.

Independent of the code under test: patterns are sampled with the parser of `re`, formats by hand.
"""

from __future__ import annotations

import copy
import json
import random
import re
from typing import Any

from jsonschema import Draft202012Validator

Schema = Any
_PARSER = re._parser  # type: ignore[attr-defined]


class Judge:
    """Says whether a value is valid, and whether it is generated: what a schema declares is all there is."""

    def __init__(self, schema: Schema) -> None:
        self.schema = schema
        self._plain = Draft202012Validator(schema, format_checker=Draft202012Validator.FORMAT_CHECKER)
        strict = _strict(schema, _merged_refs(schema))
        self._strict = Draft202012Validator(strict, format_checker=Draft202012Validator.FORMAT_CHECKER)

    def valid(self, value: Any) -> bool:
        """Whether the schema itself allows the value."""
        return self._plain.is_valid(value)

    def generated(self, value: Any) -> bool:
        """Whether the value is one that has to be accepted."""
        return self._strict.is_valid(value) and self.valid(value)

    def part(self, schema: Schema, value: Any) -> bool:
        """Whether a value is valid for a part of the document."""
        return self._plain.evolve(schema=schema).is_valid(value)


def text_of(judge: Judge, value: Any, compact: bool = False) -> str:
    """The value in the documented style: keys in the order of the schema, characters unescaped."""
    separators = (",", ":") if compact else (", ", ": ")
    return json.dumps(_ordered(judge, value, [judge.schema]), ensure_ascii=False, separators=separators)


# --- schemas as they are generated ---------------------------------------------------------------------


def _merged_refs(schema: Schema) -> set[str]:
    """References that stand beside or inside other schemas, whose targets stay open."""
    found: set[str] = set()
    if isinstance(schema, dict):
        asserting = set(schema) - {"$ref", "$defs", "description", "title", "default", "$id", "$schema"}
        if "$ref" in schema and asserting:
            found.add(schema["$ref"])
        for part in schema.get("allOf", ()):
            if isinstance(part, dict) and "$ref" in part:
                found.add(part["$ref"])
        for child in schema.values():
            found |= _merged_refs(child)
    elif isinstance(schema, list):
        for child in schema:
            found |= _merged_refs(child)
    return found


def _strict(schema: Schema, open_refs: set[str], path: str = "#", close: bool = True) -> Schema:
    if not isinstance(schema, dict):
        return schema
    result = {}
    combined = "allOf" in schema or "properties" in schema
    for key, value in schema.items():
        here = f"{path}/{key}"
        if key in ("properties", "patternProperties", "$defs", "definitions"):
            children = {
                name: _strict(child, open_refs, f"{here}/{name}", f"{here}/{name}" not in open_refs)
                for name, child in value.items()
            }
            if key == "patternProperties":
                children = {_whole_line(name): child for name, child in children.items()}
            result[key] = children
        elif key in ("anyOf", "oneOf"):
            result[key] = [_strict(c, open_refs, here, close and not combined) for c in value]
        elif key == "allOf":
            result[key] = [_strict(c, open_refs, here, False) for c in value]
        elif key == "prefixItems":
            result[key] = [_strict(c, open_refs, here) for c in value]
        elif key in ("items", "additionalProperties", "propertyNames"):
            result[key] = _strict(value, open_refs, here)
        elif key == "pattern":
            result[key] = _whole_line(value)
        else:
            result[key] = value
    if "maxLength" in schema and not {"pattern", "format"} & set(schema):
        result["pattern"] = r'^[^"\\\x00-\x1f]*\Z'  # nothing is escaped where the length is bounded
    if close and "additionalProperties" not in schema and _declares(schema):
        result["unevaluatedProperties"] = False
    if "prefixItems" in schema and "items" not in schema:
        result["items"] = False
    return result


def _declares(schema: Schema) -> bool:
    if not isinstance(schema, dict):
        return False
    parts = schema.get("allOf", ())
    return "properties" in schema or "patternProperties" in schema or any(_declares(part) for part in parts)


def _whole_line(pattern: str) -> str:
    """Python's $ also matches in front of a last line end; the standard's does not."""
    return re.sub(r"(?<!\\)\$", r"\\Z", pattern)


# --- expanding a schema ----------------------------------------------------------------------------------


def _resolve(root: Schema, reference: str) -> Schema:
    node = root
    for part in reference.split("/")[1:]:
        node = node[part.replace("~1", "/").replace("~0", "~")]
    return node


def _expanded(judge: Judge, schemas: list[Schema], choose: Any) -> list[dict]:
    """Plain schemas that all apply; `choose` picks a branch of anyOf and oneOf."""
    result = []
    for schema in schemas:
        if not isinstance(schema, dict):
            continue
        result.append(schema)
        if "$ref" in schema:
            result += _expanded(judge, [_resolve(judge.schema, schema["$ref"])], choose)
        result += _expanded(judge, schema.get("allOf", []), choose)
        for key in ("anyOf", "oneOf"):
            if key in schema:
                result += _expanded(judge, [choose(schema[key])], choose)
    return result


def _below(schemas: list[dict], name: str) -> list[Schema]:
    """What applies to a property."""
    found = []
    for schema in schemas:
        own = [schema["properties"][name]] if name in schema.get("properties", {}) else []
        own += [sub for key, sub in schema.get("patternProperties", {}).items() if re.search(key, name)]
        if not own and "additionalProperties" in schema:
            own = [schema["additionalProperties"]]
        found += own
    return found


def _items(schemas: list[dict], place: int) -> list[Schema]:
    found = []
    for schema in schemas:
        prefix = schema.get("prefixItems", [])
        if place < len(prefix):
            found.append(prefix[place])
        elif "items" in schema:
            found.append(schema["items"])
    return found


def _ordered(judge: Judge, value: Any, schemas: list[Schema]) -> Any:
    if not isinstance(value, (dict, list)):
        return value
    plain = _expanded(
        judge, schemas, lambda branches: next((b for b in branches if judge.part(b, value)), branches[0])
    )
    if any(key in schema for schema in plain for key in ("const", "enum")):
        options = [
            o for s in plain for o in (s.get("enum") or [s["const"]] if "const" in s else s.get("enum", []))
        ]
        return next((option for option in options if json.dumps(option) == json.dumps(value)), value)
    if isinstance(value, list):
        return [_ordered(judge, item, _items(plain, place)) for place, item in enumerate(value)]
    names = [name for schema in plain for name in schema.get("properties", {})]
    names += [name for schema in plain for name in schema.get("required", ())]
    names += [n for s in plain for n in (s.get("propertyNames") or {}).get("enum", ())]
    known = [name for name in dict.fromkeys(names) if name in value]
    known += [name for name in value if name not in known]
    return {name: _ordered(judge, value[name], _below(plain, name)) for name in known}


# --- valid values ----------------------------------------------------------------------------------------


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
    plain = _expanded(judge, schemas, lambda branches: _branch(branches, rng, depth))
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


ALPHABET = 'abcXYZ019 _-/"\\\n\t\u0001éßñ日本語😀👍\u00a0\u007f'

PLAIN = "".join(c for c in ALPHABET if c >= " " and c not in '"\\')


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
    value = [_make(judge, _items(plain, i), rng, depth + 1) for i in range(rng.randint(min(low, high), high))]
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
            value[name] = _make(judge, _below(plain, name), rng, depth + 1)
        except NoValue:
            if name in required:
                raise
    return value


def sample(pattern: str, rng: random.Random) -> str:
    """A text in which a pattern occurs."""
    return _sample(_PARSER.parse(pattern), rng)


def _sample(tree: Any, rng: random.Random) -> str:
    result = ""
    for op, arg in tree:
        match str(op):
            case "LITERAL":
                result += chr(arg)
            case "NOT_LITERAL":
                result += rng.choice([c for c in ALPHABET if ord(c) != arg and c != "\n"])
            case "ANY":
                result += rng.choice([c for c in ALPHABET if c not in "\n\u2028"])
            case "IN":
                result += rng.choice(_class(arg))
            case "BRANCH":
                result += _sample(rng.choice(arg[1]), rng)
            case "SUBPATTERN":
                result += _sample(arg[3], rng)
            case "MAX_REPEAT" | "MIN_REPEAT":
                low, high, body = arg
                count = rng.randint(low, min(int(high), low + 3))
                result += "".join(_sample(body, rng) for _ in range(count))
            case "AT":
                pass
            case _:
                raise AssertionError(op)
    return result


_CATEGORIES = {
    "CATEGORY_DIGIT": "0123456789",
    "CATEGORY_WORD": "abzAZ09_",
    "CATEGORY_SPACE": " \t\n",
    "CATEGORY_NOT_SPACE": "aZ0-é日",
    "CATEGORY_NOT_DIGIT": "a-é ",
    "CATEGORY_NOT_WORD": " -+",
}


def _class(items: list) -> list[str]:
    negated = bool(items) and str(items[0][0]) == "NEGATE"
    chosen: set[str] = set()
    for op, arg in items:
        match str(op):
            case "LITERAL":
                chosen.add(chr(arg))
            case "RANGE":
                chosen |= {chr(code) for code in range(arg[0], min(arg[1], arg[0] + 200) + 1)}
            case "CATEGORY":
                chosen |= set(_CATEGORIES[str(arg)])
    return (
        sorted(set(ALPHABET) - chosen - set("\n\t \u00a0\u2028" if negated else ""))
        if negated
        else sorted(chosen)
    )


def _pad(rng: random.Random, high: int, width: int = 2, low: int = 0) -> str:
    return f"{rng.randint(low, high):0{width}d}"


def _time(rng: random.Random) -> str:
    zone = rng.choice(["Z", f"+{_pad(rng, 23)}:{_pad(rng, 59)}", f"-{_pad(rng, 23)}:{_pad(rng, 59)}"])
    fraction = rng.choice(["", f".{rng.randint(0, 999999)}"])
    return f"{_pad(rng, 23)}:{_pad(rng, 59)}:{_pad(rng, 59)}{fraction}{zone}"


def _date(rng: random.Random) -> str:
    year = f"{rng.randint(1, 9999):04d}"
    day = f"{year}-{_pad(rng, 12, low=1)}-{_pad(rng, 28, low=1)}"
    return rng.choice(["2024-02-29", "2000-02-29", day, f"{year}-07-31"])


def _hex(rng: random.Random, count: int) -> str:
    return "".join(rng.choice("0123456789abcdefABCDEF") for _ in range(count))


FORMATS = {
    "date": _date,
    "time": _time,
    "date-time": lambda rng: f"{_date(rng)}T{_time(rng)}",
    "duration": lambda rng: rng.choice(["P1D", "PT5M", "P1Y2M3D", "P3W", "PT1H2M3S", "P10DT12H", "PT0S"]),
    "uuid": lambda rng: "-".join(_hex(rng, count) for count in (8, 4, 4, 4, 12)),
    "ipv4": lambda rng: ".".join(str(rng.randint(0, 255)) for _ in range(4)),
    "ipv6": lambda rng: rng.choice(["::", "::1", "fe80::1:2", "1:2:3:4:5:6:7:8", "2001:db8::", "1:2::7:8"]),
    "email": lambda rng: rng.choice(["a@b.de", "first.last+tag@mail.example.com", "x_1@ex-ample.org"]),
    "hostname": lambda rng: rng.choice(["localhost", "example.com", "x-1.example"]),
    "uri": lambda rng: rng.choice(
        ["https://example.com/a?b=c#d", "mailto:me@example.com", "urn:isbn:1", "http://u@h:80"]
    ),
}


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
