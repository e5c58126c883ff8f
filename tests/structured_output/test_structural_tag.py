"""Structural tags: schemas and expressions in them are audited as those of their own."""

# ruff: noqa: E501  # tables: a case on a line

from __future__ import annotations

import json

import pytest

from deepinfer.structured_output.errors import SchemaError
from deepinfer.structured_output.request import GrammarSpec
from deepinfer.structured_output.source import prepare
from tests.support.grammars import Compiled

RECORD = {
    "type": "object",
    "properties": {"a": {"type": "string", "pattern": "^x+$", "maxLength": 2}},
    "required": ["a"],
}


def compiled(tag: dict) -> Compiled:
    source = prepare(GrammarSpec("structural_tag", json.dumps(tag)))
    assert source.method == "structural_tag"
    return Compiled(source)


def tagged(content: dict) -> dict:
    tags = [{"type": "tag", "begin": "<f=a>", "content": content, "end": "</f>"}]
    return {"type": "structural_tag", "format": {"type": "triggered_tags", "triggers": ["<f="], "tags": tags}}


def test_free_text_around_an_enforced_part():
    older = {
        "type": "structural_tag",
        "triggers": ["<f="],
        "structures": [{"begin": "<f=a>", "schema": RECORD, "end": "</f>"}],
    }
    for grammar in (compiled(tagged({"type": "json_schema", "json_schema": RECORD})), compiled(older)):
        assert grammar.accepts("text without a tag")
        assert grammar.accepts('see: <f=a>{"a": "xx"}</f> and <f=a>{"a":"x"}</f>')
        for content in ('{"a": "xxx"}', '{"a": "y"}', "{}", '{"b": 1}', ""):
            assert not grammar.accepts(f"<f=a>{content}</f>")


def test_all_formats():
    form = {"type": "sequence", "elements": [
        {"type": "const_string", "value": "X"},
        {"type": "regex", "pattern": "a|b{2}"},
        {"type": "optional", "content": {"type": "grammar", "grammar": 'root ::= "?"'}},
        {"type": "plus", "content": {"type": "json_schema", "json_schema": {"enum": [1, 2]}}},
        {"type": "or", "elements": [{"type": "star", "content": {"type": "regex", "pattern": "é"}}, {"type": "const_string", "value": "!"}]},
    ]}  # fmt: skip
    grammar = compiled({"type": "structural_tag", "format": form})
    for text in ("Xa1", "Xbb?12", "Xa2éé", "Xa1!"):
        assert grammar.accepts(text), text
    for text in ("X", "Xb1", "Xa", "Xa3", "Xa1é!", "a1"):
        assert not grammar.accepts(text), text


BAD = [
    ({"type": "structural_tag", "format": {"type": "json_schema", "json_schema": {"not": {}}}}, "#/format/json_schema/not: "),
    (tagged({"type": "regex", "pattern": "\\bx"}), "#/format/tags/0/content/pattern: "),
    (tagged({"type": "grammar", "grammar": 'root ::= "a"{99999}'}), "#/format/tags/0/content/grammar: "),
    (tagged({"type": "regex", "pattern": 3}), "#/format/tags/0/content/pattern: must be a string"),
    (tagged({"type": "regex"}), "#/format/tags/0/content: regex needs 'pattern'"),
    (tagged({"type": "json_schema", "json_schema": {}, "any_order": True}), "#/format/tags/0/content/any_order: is not supported"),
    (tagged({"type": "qwen_xml_parameter", "json_schema": {}}), "#/format/tags/0/content/type: 'qwen_xml_parameter' is not"),
    (tagged({"type": "grammar", "grammar": "start: x", "syntax": "lark"}), "#/format/tags/0/content/syntax: "),
    ({"type": "structural_tag", "format": {"type": "sequence", "elements": {}}}, "#/format/elements: must be a list"),
    ({"type": "structural_tag", "format": 3}, "#/format: must be a format"),
    ({"type": "structural_tag"}, "#/format: must be a format"),
    ({"type": "tag", "format": {}}, "#/type: must be 'structural_tag'"),
    ({"type": "structural_tag", "triggers": [], "structures": [{"begin": "a", "end": "b", "schema": {"if": {}}}]}, "#/structures/0/schema/if: "),
    ({"type": "structural_tag", "triggers": [], "structures": [3]}, "#/structures/0: must be an object"),
]  # fmt: skip


@pytest.mark.parametrize("place", range(len(BAD)))
def test_refused_by_path(place: int):
    tag, message = BAD[place]
    with pytest.raises(SchemaError) as caught:
        prepare(GrammarSpec("structural_tag", json.dumps(tag)))
    assert str(caught.value).startswith(message)
