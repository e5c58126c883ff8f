"""Writes expressions into a grammar as they stand, where that is unambiguous.

A repeated character set costs the compiler the same whatever its bounds, while an automaton has a state for
each count. So an expression in which the next character always decides how to go on is written directly;
others become automata.
"""

from __future__ import annotations

from deepinfer.structured_output import characters as chars
from deepinfer.structured_output.characters import Ranges
from deepinfer.structured_output.ebnf import SPECIAL, Writer, repeated
from deepinfer.structured_output.regex import EMPTY, Alt, Cat, Chars, Regex, Rep

MAX_COPIES = 32  # of a group that is written out

NONE: Ranges = ()


def direct(writer: Writer, node: Regex, json: bool) -> str | None:
    """The expression as elements of a rule; None when it has to become an automaton."""
    return _emit(writer, node, json) if is_direct(node, json) else None


def is_direct(node: Regex, json: bool) -> bool:
    """Whether the next character always decides."""
    return _decides(node, NONE, json)


def _nullable(node: Regex) -> bool:
    match node:
        case Cat(parts):
            return all(_nullable(part) for part in parts)
        case Alt(options):
            return any(_nullable(option) for option in options)
        case Rep(body, low):
            return low == 0 or _nullable(body)
    return False


def _first(node: Regex) -> Ranges:
    match node:
        case Chars(ranges):
            return ranges
        case Cat(parts):
            sets = []
            for part in parts:
                sets.append(_first(part))
                if not _nullable(part):
                    break
            return chars.union(*sets)
        case Alt(options):
            return chars.union(*(_first(option) for option in options))
        case Rep(body, _, high):
            return NONE if high == 0 else _first(body)
    raise AssertionError(f"{node=}")


def _decides(node: Regex, follow: Ranges, json: bool) -> bool:
    match node:
        case Chars(ranges):
            return bool(ranges)
        case Cat(parts):
            for part in reversed(parts):
                if not _decides(part, follow, json):
                    return False
                follow = chars.union(_first(part), follow) if _nullable(part) else _first(part)
            return True
        case Alt(options):
            seen = NONE
            for option in options:
                first = _first(option)
                if chars.intersection(seen, first) or not _decides(option, follow, json):
                    return False
                seen = chars.union(seen, first)
            empty = sum(_nullable(option) for option in options)
            return bool(options) and (empty == 0 or (empty == 1 and not chars.intersection(seen, follow)))
        case Rep(body, low, high):
            first = _first(body)
            if high == 0:
                return True
            if _nullable(body) or (low != high and chars.intersection(first, follow)):
                return False
            if isinstance(body, Chars):
                # a set with escaped characters is no set of bytes, and slow to repeat with a bound
                return bool(first) and (
                    not json or not chars.intersection(first, SPECIAL) or (low <= 1 and high in (1, None))
                )
            return max(low, high or 0) <= MAX_COPIES and _decides(body, chars.union(first, follow), json)
    raise AssertionError(f"{node=}")


def _emit(writer: Writer, node: Regex, json: bool) -> str:
    match node:
        case Chars(ranges):
            return writer.character(ranges, json)
        case Cat(parts):
            return " ".join(_emit(writer, part, json) for part in parts if part != EMPTY) or '""'
        case Alt(options):
            return f"({' | '.join(_emit(writer, option, json) for option in options)})"
        case Rep(_, _, 0):
            return '""'
        case Rep(Chars(ranges), low, high) if not json or not chars.intersection(ranges, SPECIAL):
            return repeated(writer.character(ranges, json), low, high)
        case Rep(body, low, high):
            element = writer.rule(writer.fresh("g"), _emit(writer, body, json))
            name = '""'
            if high is None:
                name = writer.fresh("g")
                writer.rule(name, '""', f"{element} {name}")
            else:
                for _ in range(high - low):
                    name = writer.rule(writer.fresh("g"), '""', f"{element} {name}")
            return " ".join([element] * low + [name])
    raise AssertionError(f"{node=}")
