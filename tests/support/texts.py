"""Texts for expressions and string formats, at random: patterns by the parser of `re`, formats by hand.

Independent of the code under test.
"""

from __future__ import annotations

import random
import re
from typing import Any

_PARSER = re._parser  # type: ignore[attr-defined]
ALPHABET = 'abcXYZ019 _-/"\\\n\t\u0001éßñ日本語😀👍\u00a0\u007f'


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
