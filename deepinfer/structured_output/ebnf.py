"""Writes grammars in xgrammar's EBNF, rule by rule and within a bound on their size."""

from __future__ import annotations

from deepinfer.structured_output import characters as chars
from deepinfer.structured_output.automaton import Automaton
from deepinfer.structured_output.characters import Ranges
from deepinfer.structured_output.errors import GrammarError

MAX_GRAMMAR_CHARS = 400_000  # of all rules together

_ESCAPES = {'"': '\\"', "\\": "\\\\", "\b": "\\b", "\f": "\\f", "\n": "\\n", "\r": "\\r", "\t": "\\t"}
LAST = 0x10FFFF  # character
SPECIAL = chars.union(chars.characters('"\\'), ((0, 0x1F),))  # what a JSON string has to escape
PLAIN = chars.complement(SPECIAL)


class Writer:
    """Collects rules. With `json`, characters are written as they stand inside a JSON string."""

    def __init__(self) -> None:
        self._rules: list[str] = []
        self._size = 0
        self._count = 0
        self._known: dict[object, str] = {}

    def fresh(self, hint: str) -> str:
        """A rule name that nobody has."""
        self._count += 1
        return f"{hint}{self._count}"

    def rule(self, name: str, *options: str) -> str:
        """Adds a rule with alternatives; returns its name.

        Raises:
            GrammarError: the grammar becomes too large.
        """
        line = f"{name} ::= {' | '.join(options)}"
        self._size += len(line)
        if self._size > MAX_GRAMMAR_CHARS:
            raise GrammarError(
                f"becomes a grammar of more than {MAX_GRAMMAR_CHARS} characters: it needs fewer or shorter "
                "alternatives, constants and repeats"
            )
        self._rules.append(line)
        return name

    def text(self, root: str) -> str:
        """The whole grammar, starting from the rule `root`."""
        return "\n".join([f"root ::= {root}", *self._rules]) + "\n"

    def character(self, ranges: Ranges, json: bool) -> str:
        """An element that is one character of a set."""
        if not json:
            return class_of(ranges)
        special = chars.intersection(ranges, SPECIAL)
        if not special:
            return class_of(ranges)
        key = ("character", ranges)
        if key not in self._known:
            plain = chars.intersection(ranges, PLAIN)
            escapes = [literal(escaped(chr(c))) for low, high in special for c in range(low, high + 1)]
            options = ([class_of(plain)] if plain else []) + escapes
            self._known[key] = self.rule(self.fresh("c"), *options)
        return self._known[key]

    def automaton(self, automaton: Automaton, json: bool) -> str:
        """A rule for the texts that an automaton accepts, which must not be empty; with `json`, each with the
        quote behind it, since masks are exact only up to the end of a rule."""
        key = (automaton, json)
        if key in self._known:
            return self._known[key]
        end = literal('"') if json else '""'
        names = [self.fresh("a") for _ in automaton.edges]
        for state, row in enumerate(automaton.edges):
            if state and not row:
                continue  # what ends here has no rule
            options = [end] if automaton.accepting[state] else []
            for ranges, target in row:
                final = automaton.accepting[target] and not automaton.edges[target]
                tail = names[target] if not final else end if json else ""
                options.append(f"{self.character(ranges, json)} {tail}".rstrip())
            self.rule(names[state], *options)
        self._known[key] = names[0]
        return names[0]


def escaped(value: str) -> str:
    """A text as it stands between the quotes of a JSON string: characters beyond ASCII as they are."""
    return "".join(_ESCAPES.get(c) or (f"\\u{ord(c):04x}" if c < " " else c) for c in value)


def literal(value: str) -> str:
    """An element that is exactly a text."""
    return f'"{"".join(_quoted(ord(c)) for c in value)}"'


def class_of(ranges: Ranges) -> str:
    """An element that is one character of a non-empty set, unescaped.

    A set that goes on to the last character is written by what it leaves out: that compiles much faster.
    """
    negated = ranges[-1][1] == LAST
    if negated:  # surrogates are left out as well, or their bytes would pass
        borders = [-1, *(border for pair in ranges for border in pair)]
        ranges = tuple((borders[i] + 1, borders[i + 1] - 1) for i in range(0, len(borders) - 1, 2))
        ranges = chars.union(tuple(pair for pair in ranges if pair[0] <= pair[1]), ((0xD800, 0xDFFF),))
    parts = (_quoted(low) if low == high else f"{_quoted(low)}-{_quoted(high)}" for low, high in ranges)
    return f"[{'^' * negated}{''.join(parts)}]"


def repeated(element: str, low: int, high: int | None) -> str:
    """An element `low` to `high` times; None: without end."""
    if high is None:
        return f"{element}*" if low == 0 else f"{element}{{{low},}}"
    return '""' if high == 0 else f"{element}{{{low},{high}}}"


def _quoted(code: int) -> str:
    c = chr(code)
    if c.isalnum() or c == " ":
        return c
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
