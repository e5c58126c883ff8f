"""String formats: valid forms are accepted, and nothing is accepted that `jsonschema` or the standard refuses."""

# ruff: noqa: E501  # tables: a case on a line

from __future__ import annotations

import json
import random

import pytest
from jsonschema import Draft202012Validator

from deepinfer.structured_output import automaton
from deepinfer.structured_output.formats import FORMATS
from deepinfer.structured_output.json_grammar import json_grammar
from deepinfer.structured_output.regex import whole
from deepinfer.structured_output.source import GrammarSource
from tests.support import texts
from tests.support.grammars import Compiled

# name: (valid, invalid)
CASES = {
    "date": (["2024-02-29", "2000-02-29", "0001-01-01", "9999-12-31", "1999-11-30"],
             ["2023-02-29", "1900-02-29", "2024-02-30", "2024-04-31", "2024-13-01", "2024-00-10", "0000-01-01", "2024-1-1", "20240101", "2024-W01-1"]),
    "time": (["00:00:00Z", "23:59:59+14:00", "12:30:45.123-00:30"], ["24:00:00Z", "12:60:00Z", "12:30:60Z", "12:30:00", "12:30Z", "12:30:00.Z", "12:30:00+24:00"]),
    "date-time": (["2024-02-29T23:59:59Z", "1985-04-12T23:20:50.52+01:00"], ["2023-02-29T00:00:00Z", "2024-01-01 00:00:00Z", "2024-01-01", "2024-01-01T00:00:00"]),
    "duration": (["P1Y2M3DT4H5M6S", "P3W", "PT0S", "P1D", "PT36H"], ["P", "PT", "1D", "P1H", "P1YT", "P1S", "P1W2D", "P1D2Y", "PT1S2M", "P-1D"]),
    "uuid": (["123e4567-e89b-12d3-a456-426614174000", "00000000-0000-0000-0000-00000000000A"],
             ["123e4567e89b12d3a456426614174000", "123e4567-e89b-12d3-a456-42661417400", "g23e4567-e89b-12d3-a456-426614174000"]),
    "ipv4": (["0.0.0.0", "255.255.255.255", "192.168.1.10"], ["256.1.1.1", "1.2.3", "01.2.3.4", "1.2.3.4.5", "1.2.3.-4"]),
    "ipv6": (["::", "::1", "1::", "1:2:3:4:5:6:7:8", "fe80::a:b", "2001:DB8::", "1:2:3:4:5:6::8", "::2:3:4:5:6:7:8"],
             [":", ":::", "1:2:3:4:5:6:7", "1:2:3:4:5:6:7:8:9", "1::2::3", "12345::", "g::", "1:2:3:4:5:6:7::8", ":1", "1:"]),
    "hostname": (["a", "localhost", "www.example.com", "x-1.y2", "a" * 15 + ".b", "a-b-c-d.e"], ["", "-a", "a-", "a..b", ".a", "a.", "a_b", "a" * 64, "é.de"]),
    "email": (["a@b.de", "first.last+tag@mail.example.org"], ["a", "@b.de", "a@", "a@b", ".a@b.de", "a.@b.de", "a..b@c.de", "a b@c.de", "a@-b.de"]),
    "uri": (["https://example.com", "http://u:p@h.x:80/a/b;c?d=e&f#g", "mailto:a@b.de", "urn:isbn:1-2", "file:///etc", "a:", "x:/", "x:a/b//c", "http://%41/?"],
            ["", "example.com", "//a", "1a:b", "http://a b", "a:%4", "a:#b#c", "http://[::1]/", "a:é", "a:<b>"]),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMATS)
def test_cases(name: str):
    valid, invalid = CASES[name]
    schema = {"type": "string", "format": name}
    judge = Draft202012Validator(schema, format_checker=Draft202012Validator.FORMAT_CHECKER)
    grammar = Compiled(GrammarSource("grammar", json_grammar(schema)))
    for text in valid:
        assert grammar.accepts(json.dumps(text)) and judge.is_valid(text), text
    for text in [*invalid, *(text + "\n" for text in valid), *(f" {text}" for text in valid)]:
        assert not grammar.accepts(json.dumps(text, ensure_ascii=False)), text


@pytest.mark.parametrize("name", FORMATS)
def test_nothing_else_is_accepted(name: str):
    own, rng = automaton.of_regex(whole(FORMATS[name])), random.Random(name)
    judge = Draft202012Validator({"format": name}, format_checker=Draft202012Validator.FORMAT_CHECKER)
    accepted = 0
    for _ in range(300):
        made = texts.FORMATS[name](rng)
        assert own.accepts(made), made
        sampled = texts.sample(FORMATS[name], rng)
        assert own.accepts(sampled) and judge.is_valid(sampled), sampled
        place = rng.randint(0, len(made))
        changed = made[:place] + rng.choice("0159aZz-:.T+@/٣é \n") + made[place + rng.randrange(2) :]
        if own.accepts(changed):
            accepted += 1
            assert judge.is_valid(changed), changed
    assert accepted > 10


def test_those_with_a_checker_are_checked():
    """The comparison above means something: these formats are judged here."""
    known = Draft202012Validator.FORMAT_CHECKER.checkers
    assert {"date", "time", "date-time", "uuid", "ipv4", "ipv6", "email"} <= set(known) & set(FORMATS)
