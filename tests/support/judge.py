"""What `jsonschema` says about a value, whether it has to be accepted, and the text that it is written as.

Independent of the code under test.
"""

from __future__ import annotations

import json
import re
from typing import Any

from jsonschema import Draft202012Validator

Schema = Any


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


def expanded(judge: Judge, schemas: list[Schema], choose: Any) -> list[dict]:
    """Plain schemas that all apply; `choose` picks a branch of anyOf and oneOf."""
    result = []
    for schema in schemas:
        if not isinstance(schema, dict):
            continue
        result.append(schema)
        if "$ref" in schema:
            result += expanded(judge, [_resolve(judge.schema, schema["$ref"])], choose)
        result += expanded(judge, schema.get("allOf", []), choose)
        for key in ("anyOf", "oneOf"):
            if key in schema:
                result += expanded(judge, [choose(schema[key])], choose)
    return result


def below(schemas: list[dict], name: str) -> list[Schema]:
    """What applies to a property."""
    found = []
    for schema in schemas:
        own = [schema["properties"][name]] if name in schema.get("properties", {}) else []
        own += [sub for key, sub in schema.get("patternProperties", {}).items() if re.search(key, name)]
        if not own and "additionalProperties" in schema:
            own = [schema["additionalProperties"]]
        found += own
    return found


def items_at(schemas: list[dict], place: int) -> list[Schema]:
    """What applies to an item."""
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
    plain = expanded(
        judge, schemas, lambda branches: next((b for b in branches if judge.part(b, value)), branches[0])
    )
    if any(key in schema for schema in plain for key in ("const", "enum")):
        options = [
            o for s in plain for o in (s.get("enum") or [s["const"]] if "const" in s else s.get("enum", []))
        ]
        return next((option for option in options if json.dumps(option) == json.dumps(value)), value)
    if isinstance(value, list):
        return [_ordered(judge, item, items_at(plain, place)) for place, item in enumerate(value)]
    names = [name for schema in plain for name in schema.get("properties", {})]
    names += [name for schema in plain for name in schema.get("required", ())]
    names += [n for s in plain for n in (s.get("propertyNames") or {}).get("enum", ())]
    known = [name for name in dict.fromkeys(names) if name in value]
    known += [name for name in value if name not in known]
    return {name: _ordered(judge, value[name], below(plain, name)) for name in known}
