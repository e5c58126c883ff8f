"""Structural tags: free text with tagged parts. Schemas and expressions inside become audited grammars."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from deepinfer.structured_output.errors import GrammarError, SchemaError

MAX_DEPTH = 50  # of formats inside formats

# format -> keys with plain values, keys with one format, keys with a list of formats
_FORMATS: dict[str, tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]] = {
    "const_string": (("value",), (), ()),
    "any_text": (("excludes",), (), ()),
    "sequence": ((), (), ("elements",)),
    "or": ((), (), ("elements",)),
    "tag": (("begin", "end"), ("content",), ()),
    "triggered_tags": (("triggers", "at_least_one", "stop_after_first", "excludes"), (), ("tags",)),
    "tags_with_separator": (("separator", "at_least_one", "stop_after_first"), (), ("tags",)),
    "optional": ((), ("content",), ()),
    "plus": ((), ("content",), ()),
    "star": ((), ("content",), ()),
}
_LEAVES = {"json_schema": "json_schema", "regex": "pattern", "grammar": "grammar"}


def rewritten_tag(
    tag: Any,
    json_grammar: Callable[[Any], str],
    regex_grammar: Callable[[str], str],
    check_ebnf: Callable[[str], None],
) -> dict[str, Any]:
    """A structural tag in which every schema and expression is a grammar.

    Raises:
        GrammarError: naming the path of a format that is not supported or of what it contains.
    """

    def leaf(kind: str, value: Any, path: str) -> str:
        try:
            if kind == "json_schema":
                return json_grammar(value)
            if not isinstance(value, str):
                raise GrammarError(f"must be a string, got {value!r}")
            if kind == "regex":
                return regex_grammar(value)
            check_ebnf(value)
            return value
        except SchemaError as error:
            raise SchemaError(path + error.path[1:], error.message) from None
        except GrammarError as error:
            raise SchemaError(path, str(error)) from None

    def walk(value: Any, path: str, depth: int) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise SchemaError(path, f"must be a format of a structural tag, got {value!r}")
        if depth > MAX_DEPTH:
            raise SchemaError(path, f"formats are nested too deeply: at most {MAX_DEPTH} levels")
        kind = value.get("type", "tag" if "begin" in value else None)
        if kind in _LEAVES:
            keys = {"type", _LEAVES[kind]}
            _check_keys(value, keys, path)
            if _LEAVES[kind] not in value:
                raise SchemaError(path, f"{kind} needs {_LEAVES[kind]!r}")
            where = f"{path}/{_LEAVES[kind]}"
            return {"type": "grammar", "grammar": leaf(kind, value[_LEAVES[kind]], where)}
        if kind not in _FORMATS:
            known = ", ".join([*_LEAVES, *_FORMATS])
            raise SchemaError(f"{path}/type", f"{kind!r} is not supported: {known} are")
        plain, single, several = _FORMATS[kind]
        _check_keys(value, {"type", *plain, *single, *several}, path)
        result = {"type": kind, **{key: value[key] for key in plain if key in value}}
        for key in single:
            result[key] = walk(value.get(key), f"{path}/{key}", depth + 1)
        for key in several:
            if not isinstance(value.get(key), list):
                raise SchemaError(f"{path}/{key}", "must be a list of formats")
            result[key] = [walk(v, f"{path}/{key}/{i}", depth + 1) for i, v in enumerate(value[key])]
        return result

    if tag.get("type") != "structural_tag":
        raise SchemaError("#/type", f"must be 'structural_tag', got {tag.get('type')!r}")
    if "structures" in tag:  # the older form
        _check_keys(tag, {"type", "structures", "triggers"}, "#")
        if not isinstance(tag["structures"], list):
            raise SchemaError("#/structures", "must be a list of tags")
        tags = []
        for place, item in enumerate(tag["structures"]):
            path = f"#/structures/{place}"
            if not isinstance(item, dict):
                raise SchemaError(path, "must be an object with begin, schema and end")
            _check_keys(item, {"begin", "schema", "end"}, path)
            grammar = leaf("json_schema", item.get("schema", True), f"{path}/schema")
            content = {"type": "grammar", "grammar": grammar}
            tags.append(
                {"type": "tag", "begin": item.get("begin"), "content": content, "end": item.get("end")}
            )
        form = {"type": "triggered_tags", "triggers": tag.get("triggers"), "tags": tags}
        return {"type": "structural_tag", "format": form}
    _check_keys(tag, {"type", "format"}, "#")
    return {"type": "structural_tag", "format": walk(tag.get("format"), "#/format", 0)}


def _check_keys(value: dict[str, Any], known: set[str], path: str) -> None:
    for key in value:
        if key not in known:
            raise SchemaError(f"{path}/{key}", f"is not supported: {', '.join(sorted(known))} are")
