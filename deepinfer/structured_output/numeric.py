"""Numbers as regular expressions: the texts of every number inside given bounds.

Integers have up to 20 digits. Other numbers are plain decimals of up to 20 + 20 digits or, without bounds,
also in scientific notation as Python writes it (one digit before the point, exponents to 307), so that no
text overflows. Text and double agree about every bound: rounding cannot carry a text over an inclusive bound,
and next to an exclusive one so few digits are allowed that different texts are different doubles.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from decimal import Decimal

from deepinfer.structured_output import characters as chars
from deepinfer.structured_output.automaton import Automaton, minimal, of_regex
from deepinfer.structured_output.errors import GrammarError
from deepinfer.structured_output.regex import EMPTY, NEVER, Alt, Cat, Chars, Regex, Rep, text

INTEGER_DIGITS = 20
FRACTION_DIGITS = 20
EXACT_DIGITS = 15  # decimals of this many digits are different doubles
MAX_MULTIPLE = 1000  # largest multipleOf
_LIMIT = 10**INTEGER_DIGITS - 1

DIGIT = Chars(chars.DIGITS)
NONZERO = Chars(chars.characters("123456789"))
MINUS = text("-")
POINT = text(".")


@dataclass(frozen=True)
class Bounds:
    """An interval; None: no bound on this side."""

    low: Decimal | None = None
    low_strict: bool = False
    high: Decimal | None = None
    high_strict: bool = False

    def __and__(self, other: Bounds) -> Bounds:
        low, low_strict = _tighter((self.low, self.low_strict), (other.low, other.low_strict), 1)
        high, high_strict = _tighter((self.high, self.high_strict), (other.high, other.high_strict), -1)
        return Bounds(low, low_strict, high, high_strict)

    def contains(self, value: Decimal) -> bool:
        """Whether a number lies inside."""
        if self.low is not None and (value < self.low or (self.low_strict and value == self.low)):
            return False
        return not (
            self.high is not None and (value > self.high or (self.high_strict and value == self.high))
        )

    @property
    def is_free(self) -> bool:
        """Whether every number lies inside."""
        return self.low is None and self.high is None

    def written(self) -> Bounds:
        """The same without the bounds that no number of this style reaches."""
        low, high = self.low, self.high
        if low is not None and low < -_LIMIT:
            low = None
        if high is not None and high > _LIMIT:
            high = None
        return Bounds(low, self.low_strict and low is not None, high, self.high_strict and high is not None)

    def integers(self) -> tuple[int, int]:
        """The smallest and the largest integer inside that can be written."""
        low, high = -_LIMIT, _LIMIT
        if self.low is not None:
            low = max(low, math.floor(self.low) + 1 if self.low_strict else math.ceil(self.low))
        if self.high is not None:
            high = min(high, math.ceil(self.high) - 1 if self.high_strict else math.floor(self.high))
        return low, high


FREE = Bounds()


def _tighter(
    a: tuple[Decimal | None, bool], b: tuple[Decimal | None, bool], sign: int
) -> tuple[Decimal | None, bool]:
    if a[0] is None or b[0] is None:
        return b if a[0] is None else a
    if a[0] == b[0]:
        return a[0], a[1] or b[1]
    return a if (a[0] - b[0]) * sign > 0 else b


def integers(bounds: Bounds) -> Automaton:
    """The texts of the integers inside."""
    low, high = bounds.integers()
    return of_regex(_integers(low, high)) if low <= high else of_regex(NEVER)


def multiples(step: int) -> Automaton:
    """The texts of all multiples of a positive integer, up to leading zeros."""
    digits = [((ord("0") + d, ord("0") + d),) for d in range(10)]
    # states: the start, behind a minus, and 2 + r where r is the remainder so far
    edges = [tuple((digits[d], 2 + (state * 10 + d) % step) for d in range(10)) for state in range(step)]
    start = ((((ord("-"), ord("-")),), 1), *edges[0])
    return minimal([start, edges[0], *edges], [False, False, *(state == 0 for state in range(step))])


def numbers(bounds: Bounds) -> Automaton:
    """The texts of the numbers inside.

    Raises:
        GrammarError: a bound with too many digits.
    """
    if bounds.is_free:
        return of_regex(_FREE)
    bounds = bounds.written()
    digits = FRACTION_DIGITS
    for value, strict in ((bounds.low, bounds.low_strict), (bounds.high, bounds.high_strict)):
        if value is None:
            continue
        whole, fraction = _digits(value)
        if strict:
            digits = min(digits, EXACT_DIGITS - 1 - len(whole))
        if len(fraction) > max(digits, 0) or len(whole) > INTEGER_DIGITS:
            raise GrammarError(
                f"the bound {value} has too many digits: up to {EXACT_DIGITS - 1} can be enforced"
            )
    digits = max(digits, 0)
    low, low_strict, high, high_strict = bounds.low, bounds.low_strict, bounds.high, bounds.high_strict
    options = []
    if high is None or high > 0 or (high == 0 and not high_strict):  # 0 and above
        if low is None or low < 0:
            options.append(_decimals((Decimal(0), False), (high, high_strict), digits))
        else:
            options.append(_decimals((low, low_strict), (high, high_strict), digits))
    if low is None or low < 0:  # below 0
        nearest = (Decimal(0), True) if high is None or high >= 0 else (-high, high_strict)
        farthest = (None, False) if low is None else (-low, low_strict)
        options.append(Cat((MINUS, _decimals(nearest, farthest, digits))))
    return of_regex(Alt(tuple(options)))


def _digits(value: Decimal) -> tuple[str, str]:
    whole, _, fraction = f"{abs(value):f}".partition(".")
    return whole.lstrip("0") or "0", fraction.rstrip("0")


def _decimals(low: tuple[Decimal, bool], high: tuple[Decimal | None, bool], count: int) -> Regex:
    """Decimals >= 0 between two bounds (value, strict) with up to `count` digits behind the point."""
    low_whole, low_fraction = _digits(low[0])
    first = int(low_whole)
    if high[0] is None:
        last, high_fraction = _LIMIT + 1, ""
    else:
        high_whole, high_fraction = _digits(high[0])
        last = int(high_whole)
    bottom, top = (low_fraction, low[1]), (high_fraction, high[1])
    if first > last:
        return NEVER
    if first == last:
        return Cat((text(str(first)), _fractions(bottom, top, count)))
    options = [Cat((text(str(first)), _fractions(bottom, None, count)))]
    if first + 1 <= last - 1:
        options.append(Cat((_integers(first + 1, last - 1), _fractions(None, None, count))))
    if high[0] is not None:
        options.append(Cat((text(str(last)), _fractions(None, top, count))))
    return Alt(tuple(options))


_Bound = tuple[str, bool] | None  # digits behind the point without trailing zeros, strict


def _fractions(low: _Bound, high: _Bound, count: int) -> Regex:
    """Fractions between two bounds, with the point and at least one digit, or nothing at all for zero."""
    options = []
    if _holds("", low, high):
        options.append(EMPTY)
    if count:
        # at least one digit: a tail is allowed to be empty, so the first digit is taken here
        options.append(Cat((POINT, _tail(low, high, count, nonempty=True))))
    return Alt(tuple(options))


def _holds(rest: str, low: _Bound, high: _Bound) -> bool:
    """Whether ending here (zeros from here on) respects both bounds."""
    if low is not None and (low[0] or low[1]):
        return False
    return not (high is not None and not high[0] and high[1])


def _tail(low: _Bound, high: _Bound, count: int, nonempty: bool) -> Regex:
    """Up to `count` further digits between two bounds on them."""
    if low is not None and not low[0] and not low[1]:
        low = None  # nothing is below zero
    if low is None and high is None:
        return Rep(DIGIT, 1 if nonempty else 0, count)
    options: list[Regex] = []
    if not nonempty and _holds("", low, high):
        options.append(EMPTY)
    if count:
        groups: dict[tuple[_Bound, _Bound], str] = {}  # digits after which the same is allowed
        for digit in "0123456789":
            below, above = _after(low, digit, 1), _after(high, digit, -1)
            if not isinstance(below, bool) and not isinstance(above, bool):
                groups[below, above] = groups.get((below, above), "") + digit
        for (below, above), digits in groups.items():
            head = Chars(chars.characters(digits))
            options.append(Cat((head, _tail(below, above, count - 1, nonempty=False))))
    return Alt(tuple(options))


def _after(bound: _Bound, digit: str, sign: int) -> _Bound | bool:
    """The bound on the digits behind this one; None: none any more; False: the digit breaks the bound."""
    if bound is None:
        return None
    own = bound[0][:1] or "0"
    if digit == own:
        return bound[0][1:], bound[1]
    return None if (digit > own) == (sign > 0) else False


def _integers(low: int, high: int) -> Regex:
    """The integers from `low` to `high` without leading zeros or -0."""
    if low < 0:
        options: list[Regex] = [Cat((MINUS, _integers(max(-high, 1), -low)))]
        if high >= 0:
            options.append(_integers(0, high))
        return Alt(tuple(options))
    options = []
    for length in range(len(str(low)), len(str(high)) + 1):
        first = max(low, 10 ** (length - 1) if length > 1 else 0)
        options.append(_same_length(str(first), str(min(high, 10**length - 1))))
    return Alt(tuple(options))


def _same_length(low: str, high: str) -> Regex:
    """The digit strings between two of the same length."""
    if not low:
        return EMPTY
    rest = len(low) - 1
    if set(low[1:]) <= {"0"} and set(high[1:]) <= {"9"}:
        head = Chars(((ord(low[0]), ord(high[0])),))
        return Cat((head, Rep(DIGIT, rest, rest)))
    if low[0] == high[0]:
        return Cat((text(low[0]), _same_length(low[1:], high[1:])))
    options: list[Regex] = [
        Cat((text(low[0]), _same_length(low[1:], "9" * rest))),
        Cat((text(high[0]), _same_length("0" * rest, high[1:]))),
    ]
    if ord(high[0]) - ord(low[0]) > 1:
        middle = Chars(((ord(low[0]) + 1, ord(high[0]) - 1),))
        options.append(Cat((middle, Rep(DIGIT, rest, rest))))
    return Alt(tuple(options))


_OPTIONAL_MINUS = Rep(MINUS, 0, 1)
_PLAIN = Cat(
    (
        _OPTIONAL_MINUS,
        _integers(0, _LIMIT),
        Rep(Cat((POINT, Rep(DIGIT, 1, FRACTION_DIGITS))), 0, 1),
    )
)
_SCIENTIFIC = Cat(
    (
        _OPTIONAL_MINUS,
        NONZERO,
        Rep(Cat((POINT, Rep(DIGIT, 1, FRACTION_DIGITS))), 0, 1),
        Chars(chars.characters("eE")),
        Rep(Chars(chars.characters("+-")), 0, 1),
        Alt((Rep(DIGIT, 1, 2), Cat((Chars(chars.characters("12")), DIGIT, DIGIT)),
             Cat((text("30"), Chars(chars.characters("01234567")))))),
    )
)  # fmt: skip
_FREE = Alt((_PLAIN, _SCIENTIFIC))
