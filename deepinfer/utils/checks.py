"""Checks of values that a caller passed: each returns the plain Python value or says what would work."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping
from numbers import Real


def check_int(
    name: str, value: object, low: int | None = None, high: int | None = None, hint: str = ""
) -> int:
    """Returns `value` as an int inside [low, high] (None: no bound).

    Integers of other libraries (NumPy) are accepted; bools, floats and strings are not.

    Raises:
        TypeError: not an integer.
        ValueError: out of range.
    """
    try:
        number = None if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = None
    if number is None:
        raise TypeError(f"{name} must be an integer{_note(hint)}, got {value!r} ({type(value).__name__})")
    if (low is not None and number < low) or (high is not None and number > high):
        bounds = f"between {low} and {high}" if high is not None else f"at least {low}"
        raise ValueError(f"{name} must be {bounds}{_note(hint)}, got {number}")
    return number


def check_float(
    name: str,
    value: object,
    low: float,
    high: float,
    *,
    open_low: bool = False,
    allow_negative_infinity: bool = False,
    hint: str = "",
) -> float:
    """Returns `value` as a float inside [low, high], or (low, high] with `open_low`.

    Raises:
        TypeError: not a real number (a bool is none).
        ValueError: NaN or out of range; -inf passes only with `allow_negative_infinity`.
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number{_note(hint)}, got {value!r} ({type(value).__name__})")
    number = float(value)
    if allow_negative_infinity and number == -math.inf:
        return number
    if not low <= number <= high or (open_low and number == low):
        bracket = "(" if open_low else "["
        raise ValueError(f"{name} must be in {bracket}{low:g}, {high:g}]{_note(hint)}, got {number}")
    return number


def check_bool(name: str, value: object) -> bool:
    """Returns a bool. Raises TypeError for anything that is not a bool or an integer 0 or 1."""
    plain = value.item() if hasattr(value, "item") else value  # NumPy's bool is another type
    if isinstance(plain, bool):
        return plain
    try:
        number = operator.index(plain)  # type: ignore[arg-type]
    except TypeError:
        number = -1
    if number not in (0, 1):
        raise TypeError(f"{name} must be True or False, got {value!r} ({type(value).__name__})")
    return bool(number)


def check_int_list(name: str, value: object, low: int, high: int) -> tuple[int, ...]:
    """Returns a tuple of ints inside [low, high].

    Raises:
        TypeError: not a sequence of integers.
        ValueError: an element out of range; the message names its place.
    """
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
        raise TypeError(f"{name} must be a list of integers, got {value!r} ({type(value).__name__})")
    return tuple(check_int(f"{name}[{place}]", element, low, high) for place, element in enumerate(value))


def _note(hint: str) -> str:
    return f" ({hint})" if hint else ""
