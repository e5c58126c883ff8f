"""EBNF grammars: acceptance against an independent recogniser; what would be ignored is refused."""

from __future__ import annotations

import random

import pytest

from deepinfer.structured_output.ebnf import MAX_GRAMMAR_CHARS
from deepinfer.structured_output.errors import GrammarError
from deepinfer.structured_output.json_grammar import json_grammar
from deepinfer.structured_output.request import GrammarSpec
from deepinfer.structured_output.source import prepare
from tests.support.ebnf import Ebnf
from tests.support.grammars import Compiled
from tests.support.schemas import hand_written

GRAMMARS = {
    "answer": 'root ::= "answer=" ("yes" | "no") ";level=" [1-3]',
    "sum": 'root ::= term (("+" | "-") term)*\nterm ::= unit ("*" unit)*\nunit ::= [0-9]+ | "(" root ")"',
    "list": 'root ::= "[" (item ("," " "? item)*)? "]"\nitem ::= [a-z]{1,3} | root',
    "repeats": 'root ::= "a"{2} "b"{1,} "c"{0,2} ("d" | "e"){1,2} "f"? [g-i]* "j"+',
    "empty": 'root ::= "" | "x" root',
    "nullable": 'root ::= a{2,3} "."\na ::= "" | "p" | "q"',
    "classes": 'root ::= [^a-z"\\\\]{1,2} [\\]\\-^] [\\u00e9\\u4e00-\\u4e10] "\\n" "\\"" "\\\\"',
    "unicode": 'root ::= "日本" ("語" | "😀" | [à-ü])+ "é"?',
    "mutual": 'root ::= "<" other ">" | "x"\nother ::= "{" root "}" | "y" | root root',
    "comment": '# what comes\nroot ::= "a" b # behind\nb ::= "c"\n',
    "long-name": 'root ::= long_name-1 "b"\nlong_name-1 ::= "a" | "b"',
    "palindromes": 'root ::= "a" root "a" | "b" root "b" | "c"',
}
POOL = 'abcdefghijpqxyz019+-*()[]{}<>,. ;="\\\n日本語é😀'


@pytest.mark.parametrize("name", GRAMMARS)
def test_as_an_independent_recogniser(name: str):
    text, rng = GRAMMARS[name], random.Random(name)
    own, grammar = Ebnf(text), Compiled(prepare(GrammarSpec("ebnf", text)))
    found = {True: 0, False: 0}
    for attempt in range(200):
        value = own.sample(rng)
        if attempt % 2:
            for _ in range(rng.randint(1, 2)):
                place = rng.randint(0, len(value))
                value = value[:place] + rng.choice(["", *POOL]) + value[place + rng.randrange(2) :]
        if len(value) > 200:
            continue
        expected = own.accepts(value)
        found[expected] += 1
        assert grammar.accepts(value, as_bytes=attempt % 4 < 2) == expected, f"{value=}"
    assert found[True] >= 50 and found[False] >= 25, f"{found=}"


@pytest.mark.parametrize("name", ["order", "shape_union", "quotes_and_backslashes", "dictionary", "percent"])
def test_written_grammars_mean_what_the_compiler_reads(name: str):
    """The grammars made of schemas, read by the recogniser."""
    text, rng = json_grammar(dict(hand_written())[name]), random.Random(name)
    own, grammar = Ebnf(text), Compiled(prepare(GrammarSpec("ebnf", text)))
    for attempt in range(30):
        value = own.sample(rng)
        if attempt % 2:
            place = rng.randint(0, len(value))
            value = value[:place] + rng.choice(["", *POOL]) + value[place + rng.randrange(2) :]
        assert grammar.accepts(value) == own.accepts(value), f"{value=}"


REFUSED = {
    'root ::= "a" (="b")': r"line 1 column 14: lookaheads",
    'root ::= a\na ::= Regex("a+")': r"line 2 column 7: Regex\(\.\.\.\) is not supported",
    'root ::= TagDispatch(("a", b))': r"TagDispatch\(",
    'root ::= "a"{10001}': r"line 1 column 13: repeats 10001 times: at most 10000",
    'root ::= "a"{0,20000}': "repeats 20000 times",
    "root ::= " + "(" * 201 + '"a"' + ")" * 201: "nested too deeply: at most 200",
    'root ::= "' + "a" * MAX_GRAMMAR_CHARS + '"': "at most 400000",
}


@pytest.mark.parametrize("place", range(len(REFUSED)))
def test_refused(place: int):
    text, words = list(REFUSED.items())[place]
    with pytest.raises(GrammarError, match=words):
        prepare(GrammarSpec("ebnf", text))


def test_texts_and_classes_may_contain_what_is_refused_elsewhere():
    text = 'root ::= "Regex(x)" "{99999}" "(=a)" [{}(=)] # Regex("a") {99999}\n'
    assert Compiled(prepare(GrammarSpec("ebnf", text))).accepts("Regex(x){99999}(=a)=")
