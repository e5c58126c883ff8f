"""Reads the fields of a dataclass from a JSON object, checking types; unknown keys are left alone."""

from __future__ import annotations

import dataclasses
import functools
import math
import types
import typing
from collections.abc import Collection, Mapping
from typing import Any

from deepinfer.checkpoint.errors import ConfigError


def section(data: Mapping[str, Any], key: str, where: str = "") -> Mapping[str, Any]:
    """The JSON object under `key`; ConfigError when it is missing or not an object."""
    name = dotted(where, key)
    if key not in data:
        raise ConfigError(name, "missing; an object is required")
    if not isinstance(data[key], Mapping):
        raise ConfigError(name, f"must be an object, got {data[key]!r}")
    return data[key]


_type_hints = functools.cache(typing.get_type_hints)  # it evaluates their text


def read_fields(
    cls: type,
    data: Mapping[str, Any],
    where: str,
    *,
    skip: Collection[str] = (),
    required: Collection[str] = (),
) -> dict[str, Any]:
    """Values of the fields of dataclass `cls` found in `data`, converted to their annotated types.

    Args:
        cls: a dataclass whose annotations are int, float, bool, str, tuple[int, ...], tuple[float, ...] or
            one of these `| None`. A field without a default is a required key.
        data: the JSON object.
        where: dotted prefix for error messages.
        skip: fields that are not keys of this object.
        required: fields with a default that are required all the same.

    Raises:
        ConfigError: a required key is missing or a value has the wrong type.
    """
    hints = _type_hints(cls)
    values = {}
    for field in dataclasses.fields(cls):
        if field.name in skip:
            continue
        if field.name not in data:
            if field.default is dataclasses.MISSING or field.name in required:
                raise ConfigError(
                    dotted(where, field.name), f"missing; {_describe(hints[field.name])} is required"
                )
            continue
        values[field.name] = _convert(data[field.name], hints[field.name], dotted(where, field.name))
    return values


def dotted(where: str, key: str) -> str:
    """Full name of a key inside a section."""
    return f"{where}.{key}" if where else key


def _convert(value: Any, hint: Any, key: str) -> Any:
    """`value` as the annotated type; an int passes as a float, a bool only as a bool."""
    if isinstance(hint, types.UnionType):
        if value is None and type(None) in typing.get_args(hint):
            return None
        (hint,) = (arg for arg in typing.get_args(hint) if arg is not type(None))
    if typing.get_origin(hint) is tuple:
        if isinstance(value, (list, tuple)):
            return tuple(
                _convert(item, typing.get_args(hint)[0], f"{key}[{i}]") for i, item in enumerate(value)
            )
    elif hint is float:
        if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
            return float(value)
    elif type(value) is hint:
        return value
    raise ConfigError(key, f"must be {_describe(hint)}, got {value!r}")


def _describe(hint: Any) -> str:
    """The annotation in words, for messages."""
    if isinstance(hint, types.UnionType):
        return " or ".join("null" if arg is type(None) else _describe(arg) for arg in typing.get_args(hint))
    if typing.get_origin(hint) is tuple:
        return "a list, each item " + _describe(typing.get_args(hint)[0])
    return {int: "an integer", float: "a finite number", bool: "true or false", str: "a string"}[hint]
