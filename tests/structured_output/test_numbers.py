"""Number ranges: the accepted texts are the numbers inside, also where doubles round."""

from __future__ import annotations

import json
import random
from decimal import Decimal

import pytest

from deepinfer.structured_output.numeric import Bounds, integers, multiples, numbers


def bounds_of(rng: random.Random, digits: int) -> Bounds:
    scale = Decimal(10) ** -digits
    low, high = sorted(rng.randint(-(10**4), 10**4) * scale for _ in range(2))
    pick = rng.randrange(4)
    return Bounds(
        None if pick == 0 else low, rng.random() < 0.5 and pick != 0,
        None if pick == 1 else high, rng.random() < 0.5 and pick != 1,
    )  # fmt: skip


def near(rng: random.Random, bounds: Bounds, digits: int) -> Decimal:
    middle = rng.choice([b for b in (bounds.low, bounds.high) if b is not None])
    step = Decimal(10) ** -rng.randint(0, digits + 1)
    return middle + rng.choice([-1, 0, 1, rng.randint(-50, 50), rng.randint(-(10**5), 10**5)]) * step


@pytest.mark.parametrize("seed", range(40))
def test_ranges(seed: int):
    rng = random.Random(seed)
    digits = seed % 4
    bounds = bounds_of(rng, digits)
    whole, decimal = integers(bounds), numbers(bounds)
    inside = 0
    for _ in range(300):
        value = near(rng, bounds, digits)
        text = f"{value:f}"
        if value == 0:
            text = text.lstrip("-")
        expected = bounds.contains(value)
        inside += expected
        assert decimal.accepts(text) == expected, f"{bounds=} {text=}"
        if value == value.to_integral_value():
            assert whole.accepts(f"{int(value)}") == expected, f"{bounds=} {text=}"
            assert not whole.accepts(f"{int(value)}.0") and not whole.accepts(f"0{int(value)}")
    assert inside or (bounds.low is not None and bounds.high is not None)


@pytest.mark.parametrize("text", ["0.1", "1.5", "0", "99.999", "-273.15", "12345678.5", "-0.0001"])
@pytest.mark.parametrize("strict", [False, True])
def test_no_text_is_rounded_over_its_bound(text: str, strict: bool):
    """Texts closer to the bound than a double can tell."""
    bound = Decimal(text)
    for low in (True, False):
        own = numbers(Bounds(low=bound, low_strict=strict) if low else Bounds(high=bound, high_strict=strict))
        accepted = 0
        for digits in range(1, 22):
            for sign in (-1, 1):
                value = f"{bound + sign * Decimal(10) ** -digits:f}"
                if own.accepts(value):
                    accepted += 1
                    number, limit = json.loads(value), json.loads(text)
                    inside = number > limit or (number == limit and not strict)
                    assert inside if low else number < limit or (number == limit and not strict), value
        assert accepted > 3


@pytest.mark.parametrize("step", [1, 2, 3, 7, 10, 64, 100, 365, 1000])
def test_multiples(step: int):
    own = multiples(step)
    for value in [*range(-200, 200), 10**18, 10**18 + 1, step * 123456789]:
        assert own.accepts(str(value)) == (value % step == 0)
    assert not own.accepts("") and not own.accepts("-") and not own.accepts("--1")


def test_free_numbers_are_those_that_python_writes():
    own, rng = numbers(Bounds()), random.Random(3)
    for _ in range(500):
        value = rng.choice(
            [
                rng.uniform(-1, 1) * 10 ** rng.randint(-300, 300),
                rng.uniform(-1e6, 1e6),
                rng.randint(-(10**18), 10**18),
            ]
        )
        assert own.accepts(json.dumps(value)), value
    for text in (
        "",
        "-",
        "+1",
        ".5",
        "1.",
        "1e",
        "01",
        "1e400",
        "10e3",
        "1e308",
        "NaN",
        "Infinity",
        "1_0",
        "0x1",
        "1e5.5",
    ):
        assert not own.accepts(text), text
