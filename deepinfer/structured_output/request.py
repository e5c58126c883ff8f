"""What a request may ask its output to look like: both ways of saying it end in one GrammarSpec.

Only shapes and types are checked here. Whether a JSON schema, regex or grammar can be enforced is decided
when the request enters the engine. Nothing here imports more than the standard library.
"""

from __future__ import annotations

import difflib
import functools
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from deepinfer.utils.checks import check_bool, check_int, check_int_list

SCHEMA_TYPES = ("json", "json_object", "regex", "ebnf", "choice", "structural_tag")
SO_ARGS_KEYS = ("schema_type", "schema", "trigger_token_ids", "bound_token_id")
MAX_SOURCE_BYTES = 1 << 20  # of a schema, regex or grammar in UTF-8
MAX_TRIGGER_TOKENS = 4096
MAX_TOKEN_ID = 2**31 - 1


@dataclass(frozen=True)
class GrammarSpec:
    """The shape of an output, and from where on it holds."""

    kind: str
    """One of `SCHEMA_TYPES`."""
    source: str
    """"json" and "structural_tag": compact JSON text with the keys in the order given, since properties are
    generated in that order; "choice": a JSON list of strings; "regex" and "ebnf": as given; "json_object":
    empty."""
    trigger_token_ids: tuple[int, ...] = ()
    """Output is free until these tokens have appeared in a row; empty: the grammar holds from the start."""
    bound_token_id: int | None = None
    """When this token appears before the trigger is complete, the rest of the trigger is forced."""

    @functools.cached_property
    def cache_key(self) -> str:
        """Equal for requests that can share a compiled grammar: kind and digest of the source."""
        return f"{self.kind}:{hashlib.blake2b(self.source.encode(), digest_size=16).hexdigest()}"


@dataclass(init=False, frozen=True)
class StructuredOutputsParams:
    """Structured output in vLLM's form: exactly one of the options is given.

    Raises (on construction):
        TypeError: a value of the wrong type, or an option that does not exist.
        ValueError: none or several options, or a value that cannot be read; the message says what would work.
    """

    json: str | None = None
    """A JSON schema as text; given as text, dict or bool."""
    regex: str | None = None
    """A regular expression that the whole output matches."""
    choice: tuple[str, ...] | None = None
    """The output is one of these strings."""
    grammar: str | None = None
    """An EBNF grammar whose first rule is called `root`."""
    json_object: bool | None = None
    """True: any JSON object."""
    structural_tag: str | None = None
    """A structural tag of xgrammar as JSON text; given as text or dict."""

    def __init__(
        self,
        *,
        json: str | Mapping[str, Any] | bool | None = None,
        regex: str | None = None,
        choice: Sequence[str] | None = None,
        grammar: str | None = None,
        json_object: bool | None = None,
        structural_tag: str | Mapping[str, Any] | None = None,
        **unknown: Any,
    ) -> None:
        known = [f.name for f in fields(self)]
        if unknown:
            raise TypeError(_unknown("StructuredOutputsParams has no option", next(iter(unknown)), known))
        if json_object is not None and not check_bool("structured_outputs.json_object", json_object):
            json_object = None
        options = (json, regex, choice, grammar, json_object, structural_tag)
        for name, value in zip(known, options, strict=True):
            object.__setattr__(self, name, value)
        given = [name for name in known if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(
                f"structured_outputs needs exactly one of {', '.join(known)}, "
                f"got {', '.join(given) or 'none'}"
            )
        kind = "ebnf" if given[0] == "grammar" else given[0]
        schema = None if kind == "json_object" else getattr(self, given[0])
        spec = GrammarSpec(kind, _read_source(kind, schema, f"structured_outputs.{given[0]}"))
        object.__setattr__(self, "_spec", spec)
        if schema is not None:
            object.__setattr__(self, given[0], _kept(schema, spec))

    @property
    def spec(self) -> GrammarSpec:
        """What the engine has to enforce."""
        return self._spec  # type: ignore[attr-defined]

    def __reduce__(self) -> tuple:
        given = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) is not None}
        return _rebuild, (given,)

    def __repr__(self) -> str:
        given = [f.name for f in fields(self) if getattr(self, f.name) is not None]
        return f"StructuredOutputsParams({given[0]}={getattr(self, given[0])!r})"


def _rebuild(options: dict[str, Any]) -> StructuredOutputsParams:
    return StructuredOutputsParams(**options)


def check_so_args(args: Mapping[str, Any]) -> tuple[GrammarSpec, dict[str, Any]]:
    """The GrammarSpec of a `so_args` dict, and a copy of it that changes of the caller do not reach.

    Raises:
        TypeError: not a dict, or a value of the wrong type.
        ValueError: an unknown or missing key, or a value that cannot be read.
    """
    if not isinstance(args, Mapping):
        raise TypeError(f"so_args must be a dict, got {type(args).__name__}")
    for key in args:
        if key not in SO_ARGS_KEYS:
            raise ValueError(_unknown("so_args has no key", key, SO_ARGS_KEYS))
    kind = args.get("schema_type")
    if kind not in SCHEMA_TYPES:
        raise ValueError(f"so_args needs 'schema_type' as one of {', '.join(SCHEMA_TYPES)}, got {kind!r}")
    trigger = args.get("trigger_token_ids")
    trigger = check_int_list("so_args trigger_token_ids", () if trigger is None else trigger, 0, MAX_TOKEN_ID)
    if len(trigger) > MAX_TRIGGER_TOKENS:
        raise ValueError(
            f"so_args trigger_token_ids has {len(trigger)} tokens: a trigger has at most {MAX_TRIGGER_TOKENS}"
        )
    bound = args.get("bound_token_id")
    if bound is not None:
        bound = check_int("so_args bound_token_id", bound, 0, MAX_TOKEN_ID)
        if not trigger:
            raise ValueError(f"so_args bound_token_id={bound} needs a non-empty trigger_token_ids to force")
    schema = args.get("schema")
    spec = GrammarSpec(kind, _read_source(kind, schema, "so_args 'schema'"), trigger, bound)
    kept: dict[str, Any] = {"schema_type": kind, "schema": _kept(schema, spec)}
    if trigger:
        kept["trigger_token_ids"] = trigger
    if bound is not None:
        kept["bound_token_id"] = bound
    return spec, kept


def check_structured_outputs(value: Any) -> StructuredOutputsParams:
    """A StructuredOutputsParams as it is, or one made of a dict with its options."""
    if isinstance(value, Mapping):
        value = StructuredOutputsParams(**value)
    if not isinstance(value, StructuredOutputsParams):
        raise TypeError(
            f"structured_outputs must be a StructuredOutputsParams or a dict of its options, got {value!r}"
        )
    return value


def parse_json(text: str, name: str) -> Any:
    """The value of a JSON text, strictly: no repeated keys, no NaN or Infinity.

    Raises:
        ValueError: with the position of what is wrong.
    """

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(items)
        if len(result) < len(items):
            keys = [key for key, _ in items]
            twice = next(key for key in result if keys.count(key) > 1)
            raise ValueError(f"{name} has the key {twice!r} twice in one object")
        return result

    def constant(token: str) -> Any:
        raise ValueError(f"{name} contains {token}, which is not JSON")

    try:
        return json.loads(text, object_pairs_hook=pairs, parse_constant=constant)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{name} is not JSON: {error.msg} at line {error.lineno} column {error.colno}"
        ) from None
    except RecursionError:
        raise ValueError(f"{name} is nested too deeply to be read as JSON") from None


def _kept(schema: Any, spec: GrammarSpec) -> Any:
    """The schema as an immutable value that reads back as the same spec."""
    if isinstance(schema, str):
        return schema
    return tuple(schema) if spec.kind == "choice" else spec.source


def _read_source(kind: str, schema: Any, name: str) -> str:
    source = _READERS[kind](schema, name)
    try:
        size = len(source.encode())
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{name} has a lone surrogate at character {error.start}: give Unicode text"
        ) from None
    if size > MAX_SOURCE_BYTES:
        raise ValueError(f"{name} has {size} bytes: it may have at most {MAX_SOURCE_BYTES}")
    return source


def _read_text(schema: Any, name: str) -> str:
    if not isinstance(schema, str):
        raise ValueError(f"{name} must be a string, got {schema!r}")
    if not schema:
        raise ValueError(f"{name} is empty: leave structured output out to generate freely")
    return schema


def _read_json(schema: Any, name: str) -> str:
    if isinstance(schema, str):
        schema = parse_json(schema, name)
    if not isinstance(schema, (Mapping, bool)):
        raise ValueError(f"{name} must be a JSON schema as text or as a dict, got {schema!r}")
    return _dump(schema, name)


def _read_tag(schema: Any, name: str) -> str:
    if isinstance(schema, str):
        schema = parse_json(schema, name)
    if not isinstance(schema, Mapping):
        raise ValueError(f"{name} must be a structural tag as JSON text or as a dict, got {schema!r}")
    return _dump(schema, name)


def _read_choice(schema: Any, name: str) -> str:
    if isinstance(schema, str) or not isinstance(schema, Sequence):
        raise ValueError(f"{name} must be a list of strings to choose from, got {schema!r}")
    if not schema:
        raise ValueError(f"{name} is empty: give at least one string to choose from")
    for place, option in enumerate(schema):
        if not isinstance(option, str) or not option:
            raise ValueError(f"{name}[{place}] must be a non-empty string, got {option!r}")
    return _dump(list(dict.fromkeys(schema)), name)


def _read_nothing(schema: Any, name: str) -> str:
    if schema not in (None, "", "{}", {}):
        raise ValueError(f"json_object takes no schema, got {schema!r}: use schema_type 'json' for one")
    return ""


_READERS: dict[str, Callable[[Any, str], str]] = {
    "json": _read_json,
    "json_object": _read_nothing,
    "regex": _read_text,
    "ebnf": _read_text,
    "choice": _read_choice,
    "structural_tag": _read_tag,
}


def _dump(value: Any, name: str) -> str:
    try:
        return json.dumps(
            value, ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=_plain_mapping
        )
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} cannot be written as JSON: {error}") from None
    except RecursionError:
        raise ValueError(f"{name} is nested too deeply to be written as JSON") from None


def _plain_mapping(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"a {type(value).__name__} is not a JSON value")


def _unknown(what: str, key: Any, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(str(key), known, n=1)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    return f"{what} {key!r}{hint}; it knows {', '.join(known)}"
