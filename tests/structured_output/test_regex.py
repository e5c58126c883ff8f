"""Regular expressions: accepted texts against `re.fullmatch`, and the constructs that are refused."""

# ruff: noqa: E501  # tables: a case on a line

from __future__ import annotations

import json
import random
import re

import pytest

from deepinfer.structured_output import automaton
from deepinfer.structured_output.errors import GrammarError
from deepinfer.structured_output.regex import whole, within
from deepinfer.structured_output.request import GrammarSpec
from deepinfer.structured_output.source import prepare
from tests.support.grammars import Compiled
from tests.support.texts import sample

EXPRESSIONS = [
    "[A-Z]{2}-[0-9]{3}", "a", "", "a?", "a*", "a+b*", "(ab)+", "(a|b)*abb", "a|bc|def", "(a|b|)c", "a{3}", "a{2,}", "a{0}",
    "a{1,3}b{0,2}", "(a{2}|b){2,3}", "(a*)*b", "(a|aa)+", "((a?)?)?", "a*?b+?c??", "x{2,3}?", "(?:a|b)c", "(?P<n>a)(?P<m>b)",
    "^a$", "^(a|b)$", "^a|b$", "(^a|b)c", "a(b$|c)", "^^a$$", "[abc]", "[^abc]", "[a-c0-2_-]", "[-a]", "[a\\]b]", "[\\^a]", "[a^]",
    "[.]", "[\\d]", "\\d+", "[\\w]+", "\\w", "[\\s]", "\\s*", "\\D", "\\W", "\\S", "[^\\d]", "[^\\w\\s]", "[\\S]", "[\\D\\d]", ".", ".*",
    "\\.", "\\*\\+\\?\\(\\)\\[\\]\\{\\}\\|\\\\\\^\\$", "\\/", "\\-", "\\n\\t\\r\\f\\v", "\\x41\\u0042", "[\\x61-\\x63]", "[\\u4e00-\\u4e10]+",
    "é", "[à-ü]{2}", "😀+", "[😀-😏]", "日本|語", "a{", "{a", "a{x}", "a}", "]", "-", "[{}]", '"', "\\\\", "'", "#", " ", "\n", "\x00",
    "(0|[1-9]\\d*)(\\.\\d+)?([eE][+-]?\\d+)?", "[^@]+@[^@]+", "(\\d{1,3}\\.){3}\\d{1,3}", "#[0-9a-f]{6}", "(yes|no|maybe) ?!*",
    "\\+?[0-9]{1,3}(-[0-9]{2,4}){1,3}", "(a(b(c)?)?)?d", "[\\[\\]]", "[a-\\x7a]",
]  # fmt: skip

# characters of which every dialect says the same: no foreign digits, letters in \\w, or odd spaces
POOL = "abcdexyzABZ019 _-.+*?\"\\/\t\n#@{}[]()|^$!'日本語é😀"
PLAIN = re.compile(r"[\x00-\x7f]*")


@pytest.mark.parametrize("place", range(len(EXPRESSIONS)), ids=lambda place: f"{place:02d}")
def test_as_fullmatch(place: int):
    expression = EXPRESSIONS[place]
    python, rng = re.compile(expression, re.ASCII), random.Random(place)
    grammar = Compiled(prepare(GrammarSpec("regex", expression))) if expression else None
    own = automaton.of_regex(whole(expression))
    matched = 0
    for attempt in range(150):
        text = sample(expression, rng) if attempt % 3 else "".join(rng.choices(POOL, k=rng.randrange(5)))
        if attempt % 3 == 2 and text:
            at = rng.randrange(len(text) + 1)
            text = text[:at] + rng.choice(["", *POOL]) + text[at + rng.randrange(2) :]
        if "\\s" in expression.lower() and re.search(r"[^\S \t\n\r\f\v]", text):
            continue
        expected = python.fullmatch(text) is not None
        if not PLAIN.fullmatch(text) and re.search(r"\\[DWSw]", expression):
            expected = expected and own.accepts(text)  # stricter beyond ASCII, see below
        assert own.accepts(text) == expected, f"{expression=} {text=}"
        if grammar is not None and attempt < 60:
            assert grammar.accepts(text, as_bytes=attempt % 2 == 1) == expected, f"{expression=} {text=}"
        matched += expected
    assert matched >= 30


def test_classes_hold_what_all_dialects_agree_on():
    """ASCII digits and letters only where they are asked for; no digit of any script where they are ruled out."""
    cases = {
        "\\d": ("7", "٣７"), "\\w": ("aZ_0", "éß日"), "\\s": (" \n\u00a0\u3000", "\ufeff\x1c\x85"),
        "\\D": ("aé-", "7٣"), "\\W": (" -😀", "aé日_"), "\\S": ("aé", " \u00a0\ufeff\x1c"),
        "[^\\d]": ("é", "٣"), "[^\\D]": ("5", "٣a"), "[^\\s]": ("a", "\ufeff\x85 "), ".": ("a\t\x85", "\n\r\u2028\u2029"),
        "[^a]": ("\nb\u2028", "a"),
    }  # fmt: skip
    for expression, (inside, outside) in cases.items():
        found = automaton.of_regex(whole(expression))
        assert all(found.accepts(c) for c in inside), expression
        assert not any(found.accepts(c) for c in outside), expression
        for c in inside:  # so every accepted text suits Python, with and without ASCII
            assert re.fullmatch(expression, c) is not None, f"{expression=} {c=}"
            if expression not in ("\\s",):
                assert re.fullmatch(expression, c, re.ASCII) is not None, f"{expression=} {c=}"


def random_expression(rng: random.Random, depth: int) -> str:
    if depth == 0:
        return rng.choice(["a", "b", "c", "[ab]", "[^a]", "(?:)", "\\d", "."])
    parts = [random_expression(rng, depth - 1) for _ in range(rng.randint(1, 3))]
    match rng.randrange(4):
        case 0:
            return f"(?:{'|'.join(parts)})"
        case 1:
            return f"(?:{''.join(parts)}){rng.choice(['*', '+', '?', '{2}', '{1,3}', '{0,2}', '{2,}'])}"
    return "".join(parts)


@pytest.mark.parametrize("seed", range(40))
def test_random_expressions(seed: int):
    rng = random.Random(seed)
    expression = random_expression(rng, 3)
    python, own = re.compile(expression), automaton.of_regex(whole(expression))
    found = automaton.of_regex(within(f"^(?:{expression})$"))
    negated = own.complement()
    for _ in range(200):
        text = "".join(rng.choices("abc1", k=rng.randrange(9)))
        expected = python.fullmatch(text) is not None
        assert own.accepts(text) == found.accepts(text) == expected != negated.accepts(text), (
            f"{expression=} {text=}"
        )
    assert (own & negated).is_empty


SEARCHES = [
    "b",
    "^b",
    "b$",
    "^b$",
    "",
    "^",
    "$",
    "a|^b",
    "^a|b$",
    "(^a|b)c",
    "a(b|c$)",
    "^(a|b)+$",
    "a.c",
    "\\d{2}",
    "(?:a|^b)$",
]


@pytest.mark.parametrize("place", range(len(SEARCHES)))
def test_as_search(place: int):
    expression, rng = SEARCHES[place], random.Random(place)
    own, python = automaton.of_regex(within(expression)), re.compile(expression.replace("$", "\\Z"))
    for _ in range(300):
        text = "".join(rng.choices("abc12\n", k=rng.randrange(7)))
        assert own.accepts(text) == (python.search(text) is not None), f"{expression=} {text=}"


# expression: words of the message; what a matcher might misread is never passed on
REFUSED = {
    "(?=a)b": "lookaheads", "a(?!b)": "lookaheads", "(?<=a)b": "lookbehinds", "(?<!a)b": "lookbehinds", "\\bfoo\\b": "word boundaries",
    "a\\Bb": "word boundaries", "(a)\\1": "back references", "(?P<x>a)(?P=x)": "back references", "(?<x>a)\\k<x>": "back references",
    "(?i)abc": "flags such as", "(?s:.)": "flags such as", "a(?#c)": "comments", "(?>a)b": "atomic groups", "a*+": "possessive",
    "(a)(?(1)b|c)": "conditional", "\\p{L}": "Unicode properties", "\\PL": "Unicode properties", "[[:alpha:]]": "POSIX", "\\Aa": "use \\^",
    "a\\Z": "use \\$", "\\01": "octal", "\\0": "octal", "\\cA": "control escapes", "[\\b]": "backspace", "\\y": "escape .y is not",
    "a**": "quantifier follows", "*a": "nothing to repeat", "a|+": "nothing to repeat", "(?:*)": "nothing to repeat", "{2}": "nothing to repeat",
    "^*a": "anchor cannot be repeated", "a^b": "ends of an alternative", "(a$)+": "ends of an alternative", "a{2,1}": "wrong way round",
    "a{,3}": r"write \{0,n\}", "[z-a]": "wrong way round", "[a-\\d]": "from one character to another", "[]a]": "write ", "[^]a]": "write ",
    "[a": "class is not closed", "(a": "group is not closed", "a)": "unmatched", "\\": "ends too early", "\\x4": "2 hexadecimal",
    "\\u12": "4 hexadecimal", "\\ud800": "no character", "(?P<1>a)": "not an identifier", "a{10001}": "at most 10000", "a{0,99999999999}": "at most 10000",
    "(((a{10}){10}){10}){30}": "at most 20000", "(a{1,100}){1,100}": "2000 states", "[ab]*a[ab]{12}": "2000 states",
    "(" * 101 + "a" + ")" * 101: "at most 100 levels", "[^\\s\\S]": "no text matches", "a[^\\x00-\\U0010ffff]": "no text matches",
}  # fmt: skip


@pytest.mark.parametrize("place", range(len(REFUSED)))
def test_refused(place: int):
    expression, words = list(REFUSED.items())[place]
    with pytest.raises(GrammarError, match=words):
        prepare(GrammarSpec("regex", expression))


def test_choices():
    options = ["yes", "no", 'quote"', "back\\slash", "line\nend", "日本", "😀", "yes and no", "[a-z]*"]
    grammar = Compiled(prepare(GrammarSpec("choice", json.dumps(options))))
    for option in options:
        assert grammar.accepts(option) and grammar.accepts(option, as_bytes=True)
    for other in ("", "ye", "yes ", "yesno", "quote", "back", "日", "abc", "yes and"):
        assert not grammar.accepts(other)


def test_any_json_object():
    grammar = Compiled(prepare(GrammarSpec("json_object", "")))
    for text in ("{}", '{"a": [1, {"b": null}], "é": -1.5e-07}', '{"":""}'):
        assert grammar.accepts(text)
    for text in ("[]", "1", "null", '{"a"}', '{"a": }', '{"a": 1} ', "", "{'a': 1}"):
        assert not grammar.accepts(text)
