"""Every schema of the shared list: the grammar accepts and rejects exactly what `jsonschema` does."""

from __future__ import annotations

import json
import random

import pytest

from deepinfer.structured_output.request import GrammarSpec
from deepinfer.structured_output.source import prepare
from tests.support.grammars import Compiled
from tests.support.instances import NoValue, mutated, valid_instance
from tests.support.judge import Judge, text_of
from tests.support.schemas import all_schemas, hand_written

SCHEMAS = dict(all_schemas())
INSERTS = [
    "",
    " ",
    "\n",
    '"',
    "\\",
    "0",
    ",",
    "\\u0041",
    "-",
    ".",
    "e1",
    "[",
    "}",
    "true",
    "\t",
    "\\/",
    "\x00",
    "é",
]


def test_the_list_is_long_and_its_names_are_unique():
    assert len(SCHEMAS) == len(all_schemas()) >= 320
    assert len(hand_written()) >= 50
    assert len({json.dumps(schema) for schema in SCHEMAS.values()}) >= 300


@pytest.mark.parametrize("name", SCHEMAS)
def test_texts_are_accepted_exactly_as_jsonschema_says(name: str):
    schema, rng = SCHEMAS[name], random.Random(name)
    judge, grammar = Judge(schema), Compiled(prepare(GrammarSpec("json", json.dumps(schema))))
    # other values of a format may be valid without being in the form that is generated
    has_format = '"format"' in json.dumps(schema)
    for attempt in range(4):
        try:
            value = valid_instance(judge, rng)
        except NoValue:  # of constants and such there may be none among random values
            assert name.startswith("generated")
            break
        text = text_of(judge, value, compact=attempt % 2 == 1)
        assert grammar.accepts(text, as_bytes=attempt == 2), text
        for _ in range(4):
            other = mutated(value, rng)
            text = text_of(judge, other)
            if grammar.accepts(text):
                assert judge.valid(other), text
            elif not has_format:
                assert not judge.generated(other), text
            text = damaged(text, rng)
            if grammar.accepts(text):
                assert judge.valid(json.loads(text)), text
    text = grammar.walk(rng, limit=500)
    assert text is not None and judge.valid(json.loads(text)), text


def damaged(text: str, rng: random.Random) -> str:
    """A text with a change that knows nothing of JSON."""
    place = rng.randint(0, len(text))
    return text[:place] + rng.choice(INSERTS) + text[place + rng.randrange(3) :]


def test_most_schemas_have_valid_values_of_every_kind():
    found, rejected = 0, 0
    for name, schema in SCHEMAS.items():
        judge, rng = Judge(schema), random.Random(name)
        try:
            value = valid_instance(judge, rng)
        except NoValue:
            continue
        found += 1
        rejected += any(not judge.generated(mutated(value, rng)) for _ in range(20))
    assert found >= 310 and rejected >= 310, f"{found=} {rejected=}"
