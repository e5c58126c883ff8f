"""Reads regular expressions: the subset on whose meaning Python and ECMAScript agree.

What is not regular (lookaround, back references, word boundaries), depends on flags or means different things
in different dialects is refused with its position. Lazy quantifiers are read as greedy ones, which match the
same whole texts.
"""

from __future__ import annotations

from dataclasses import dataclass

from deepinfer.structured_output import characters as chars
from deepinfer.structured_output.characters import Ranges
from deepinfer.structured_output.errors import GrammarError

MAX_REPEAT = 10_000  # of one quantifier
MAX_NESTING = 100  # of groups


@dataclass(frozen=True)
class Chars:
    """One character of a set."""

    ranges: Ranges


@dataclass(frozen=True)
class Cat:
    """One part after the other; without parts, the empty text."""

    parts: tuple[Regex, ...]


@dataclass(frozen=True)
class Alt:
    """Any of the options; without options, nothing at all."""

    options: tuple[Regex, ...]


@dataclass(frozen=True)
class Rep:
    """A body `low` to `high` times; None: without end."""

    body: Regex
    low: int
    high: int | None


@dataclass(frozen=True)
class Edge:
    """`^` (start) or `$` (end)."""

    start: bool


Regex = Chars | Cat | Alt | Rep | Edge

EMPTY = Cat(())
NEVER = Alt(())
ANYTHING = Rep(Chars(chars.EVERY), 0, None)

_CONTROLS = {"t": "\t", "n": "\n", "r": "\r", "f": "\f", "v": "\v"}
_REFUSED_ESCAPES = {
    "b": "word boundaries (\\b) are not supported: spell out which characters may stand there",
    "B": "word boundaries (\\B) are not supported: spell out which characters may stand there",
    "A": "\\A is not supported: use ^",
    "Z": "\\Z is not supported: use $",
    "z": "\\z is not supported: use $",
    "p": "Unicode properties (\\p) are not supported: list the characters in a class, as in [a-zà-ÿ]",
    "P": "Unicode properties (\\P) are not supported: list the characters in a class, as in [^a-zà-ÿ]",
    "k": "back references (\\k) are not supported: spell out what may stand there",
    "c": "control escapes (\\c) are not supported: use \\xHH",
}
_REFUSED_GROUPS = {
    "=": "lookaheads are not supported: spell out what may stand there",
    "!": "lookaheads are not supported: spell out what may stand there",
    "<=": "lookbehinds are not supported: spell out what may stand there",
    "<!": "lookbehinds are not supported: spell out what may stand there",
    ">": "atomic groups are not supported: use (?:...)",
    "P=": "back references are not supported: spell out what may stand there",
    "(": "conditional groups are not supported",
    "#": "comments are not supported",
}


def whole(source: str) -> Regex:
    """The texts that the expression matches from end to end (as `re.fullmatch`).

    Raises:
        GrammarError: naming the position of what cannot be read.
    """
    return _anchored(_Parser(source).parse(), source, EMPTY, EMPTY)


def within(source: str) -> Regex:
    """The texts in which the expression occurs (as `re.search`, and as a JSON schema's `pattern`).

    Raises:
        GrammarError: naming the position of what cannot be read.
    """
    return _anchored(_Parser(source).parse(), source, ANYTHING, ANYTHING)


def text(value: str) -> Regex:
    """Exactly one text."""
    return Cat(tuple(Chars(((ord(c), ord(c)),)) for c in value))


def _anchored(node: Regex, source: str, before: Regex, after: Regex) -> Regex:
    """Resolves the anchors at the edges; `before` and `after` stand where there is none."""
    if isinstance(node, Alt):
        return Alt(tuple(_anchored(option, source, before, after) for option in node.options))
    parts = _flat(node)
    while parts and parts[0] == Edge(True):
        parts, before = parts[1:], EMPTY
    while parts and parts[-1] == Edge(False):
        parts, after = parts[:-1], EMPTY
    if len(parts) == 1 and isinstance(parts[0], Alt):
        return _anchored(parts[0], source, before, after)
    for place in (0, -1):  # (^a|b)c is ^ac|bc
        if parts and isinstance(parts[place], Alt) and _has_edge(parts[place]):
            rest = parts[1:] if place == 0 else parts[:-1]
            options = parts[place].options
            spread = [Cat((o, *rest)) if place == 0 else Cat((*rest, o)) for o in options]
            return Alt(tuple(_anchored(option, source, before, after) for option in spread))
    if any(_has_edge(part) for part in parts):
        raise GrammarError(f"{_quoted(source)}: ^ and $ are supported at the ends of an alternative only")
    return Cat((before, *parts, after))


def _flat(node: Regex) -> tuple[Regex, ...]:
    if not isinstance(node, Cat):
        return (node,)
    return tuple(part for child in node.parts for part in _flat(child))


def _has_edge(node: Regex) -> bool:
    match node:
        case Edge():
            return True
        case Cat(children) | Alt(children):
            return any(_has_edge(child) for child in children)
        case Rep(body):
            return _has_edge(body)
    return False


def _quoted(source: str) -> str:
    return repr(source) if len(source) <= 80 else f"{source[:80]!r}..."


class _Parser:
    """Recursive descent over one expression."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._place = 0
        self._depth = 0

    def parse(self) -> Regex:
        node = self._alternatives()
        if self._place < len(self._source):
            raise self._error("unmatched )")
        return node

    def _error(self, message: str, place: int | None = None) -> GrammarError:
        place = self._place if place is None else place
        return GrammarError(f"{_quoted(self._source)}, position {place}: {message}")

    def _peek(self, text: str) -> bool:
        return self._source.startswith(text, self._place)

    def _take(self, text: str) -> bool:
        if self._peek(text):
            self._place += len(text)
            return True
        return False

    def _next(self) -> str:
        if self._place >= len(self._source):
            raise self._error("the expression ends too early")
        self._place += 1
        return self._source[self._place - 1]

    def _alternatives(self) -> Regex:
        self._depth += 1
        if self._depth > MAX_NESTING:
            raise self._error(f"groups are nested too deeply: at most {MAX_NESTING} levels")
        options = [self._sequence()]
        while self._take("|"):
            options.append(self._sequence())
        self._depth -= 1
        return options[0] if len(options) == 1 else Alt(tuple(options))

    def _sequence(self) -> Regex:
        parts: list[Regex] = []
        while self._place < len(self._source) and not self._peek("|") and not self._peek(")"):
            parts.append(self._quantified(self._atom()))
        return parts[0] if len(parts) == 1 else Cat(tuple(parts))

    def _atom(self) -> Regex:
        place = self._place
        c = self._next()
        match c:
            case "(":
                self._open_group(place)
                node = self._alternatives()
                if not self._take(")"):
                    raise self._error("this group is not closed", place)
                return node
            case "[":
                return self._class(place)
            case ".":
                return Chars(chars.complement(chars.LINE_ENDS))
            case "^" | "$":
                return Edge(c == "^")
            case "*" | "+" | "?":
                raise self._error(f"nothing to repeat before {c!r}", place)
            case "\\":
                narrow, _ = self._escape(place, in_class=False)
                return Chars(narrow)
            case "{" if self._bounds(place) is not None:
                raise self._error("nothing to repeat before '{'", place)
        return Chars(self._literal(c, place))

    def _literal(self, c: str, place: int) -> Ranges:
        code = ord(c)
        if 0xD800 <= code <= 0xDFFF:
            raise self._error("a surrogate is no character", place)
        return ((code, code),)

    def _open_group(self, place: int) -> None:
        if not self._take("?"):
            return
        if self._take(":"):
            return
        for start, message in _REFUSED_GROUPS.items():
            if self._peek(start):
                raise self._error(message, place)
        if self._take("P<") or self._take("<"):
            end = self._source.find(">", self._place)
            if end < 0 or not self._source[self._place : end].isidentifier():
                raise self._error("this group's name is not an identifier", place)
            self._place = end + 1
            return
        raise self._error("flags such as (?i) are not supported: write both cases, as in [aA]", place)

    def _quantified(self, node: Regex) -> Regex:
        place = self._place
        if self._take("*"):
            low, high = 0, None
        elif self._take("+"):
            low, high = 1, None
        elif self._take("?"):
            low, high = 0, 1
        elif self._peek("{") and (bounds := self._bounds(place)) is not None:
            low, high, self._place = bounds
        else:
            return node
        if isinstance(node, Edge):
            raise self._error("an anchor cannot be repeated", place)
        if max(low, high or 0) > MAX_REPEAT:
            raise self._error(
                f"repeats {max(low, high or 0)} times: at most {MAX_REPEAT} can be enforced", place
            )
        if high is not None and high < low:
            raise self._error(f"the bounds {{{low},{high}}} are the wrong way round", place)
        if self._take("+"):
            raise self._error("possessive quantifiers are not supported: leave the second + out")
        self._take("?")
        if self._place < len(self._source) and self._source[self._place] in "*+?":
            raise self._error("a quantifier follows a quantifier: put a group around the first")
        return Rep(node, low, high)

    def _bounds(self, place: int) -> tuple[int, int | None, int] | None:
        """(low, high, position behind) of `{m}`, `{m,}`, `{m,n}`; None: this brace is a plain character."""
        end = self._source.find("}", place)
        body = self._source[place + 1 : end] if end > 0 else ""
        low, comma, high = body.partition(",")
        if not body or not all(part.isascii() and (part.isdigit() or not part) for part in (low, high)):
            return None
        if not low:
            raise self._error("{,n} means different things in different dialects: write {0,n}", place)
        if max(len(low), len(high)) > 9:
            raise self._error(f"repeats {body} times: at most {MAX_REPEAT} can be enforced", place)
        return int(low), (int(high) if high else None) if comma else int(low), end + 1

    def _class(self, place: int) -> Regex:
        negated = self._take("^")
        if self._peek("]"):
            raise self._error("a class starting with ] is read differently elsewhere: write \\]", place)
        sets: list[Ranges] = []
        if any(self._peek(f"[{mark}") for mark in ":.="):
            raise self._error("POSIX classes such as [:alpha:] are not supported: list the characters", place)
        while not self._take("]"):
            if self._place >= len(self._source):
                raise self._error("this class is not closed", place)
            narrow, wide = self._member()
            if self._peek("-") and not self._peek("-]"):
                self._place += 1
                if self._peek("-") or self._place >= len(self._source):
                    raise self._error("this range has no end: write \\- for a hyphen")
                upper, _ = self._member()
                if not (_is_single(narrow) and _is_single(upper)):
                    raise self._error("a range goes from one character to another: write \\- for a hyphen")
                low, high = narrow[0][0], upper[0][0]
                if high < low:
                    raise self._error(f"the range {chr(low)}-{chr(high)} is the wrong way round")
                narrow = wide = chars.intersection(((low, high),), chars.EVERY)
            sets.append(wide if negated else narrow)
        ranges = chars.union(*sets)
        return Chars(chars.complement(ranges) if negated else ranges)

    def _member(self) -> tuple[Ranges, Ranges]:
        place = self._place
        c = self._next()
        if c == "\\":
            return self._escape(place, in_class=True)
        literal = self._literal(c, place)
        return literal, literal

    def _escape(self, place: int, in_class: bool) -> tuple[Ranges, Ranges]:
        """(what every dialect includes, what any dialect includes)."""
        c = self._next()
        match c:
            case "d":
                return chars.DIGITS, chars.wide_digits()
            case "w":
                return chars.WORDS, chars.wide_words()
            case "s":
                return chars.SPACES, chars.WIDE_SPACES
            case "D":
                return chars.complement(chars.wide_digits()), chars.complement(chars.DIGITS)
            case "W":
                return chars.complement(chars.wide_words()), chars.complement(chars.WORDS)
            case "S":
                return chars.complement(chars.WIDE_SPACES), chars.complement(chars.SPACES)
            case "x" | "u" | "U":
                literal = self._hexadecimal({"x": 2, "u": 4, "U": 8}[c], place)
                return literal, literal
        if c in _CONTROLS:
            literal = chars.characters(_CONTROLS[c])
        elif c in _REFUSED_ESCAPES:
            message = _REFUSED_ESCAPES[c]
            if c == "b" and in_class:
                message = "\\b in a class means a backspace: write \\x08"
            raise self._error(message, place)
        elif c.isdigit():
            raise self._error("back references and octal escapes are not supported: use \\xHH", place)
        elif c.isalpha():
            raise self._error(f"the escape \\{c} is not supported", place)
        else:
            literal = self._literal(c, place)
        return literal, literal

    def _hexadecimal(self, count: int, place: int) -> Ranges:
        digits = self._source[self._place : self._place + count]
        if len(digits) < count or not all(d in "0123456789abcdefABCDEF" for d in digits):
            raise self._error(f"this escape needs {count} hexadecimal digits", place)
        self._place += count
        code = int(digits, 16)
        if code > 0x10FFFF or 0xD800 <= code <= 0xDFFF:
            raise self._error(f"{code:#x} is no character", place)
        return ((code, code),)


def _is_single(ranges: Ranges) -> bool:
    return len(ranges) == 1 and ranges[0][0] == ranges[0][1]
