"""Each JSON-Schema keyword: what it lets through, what it stops, and how it is refused."""

# ruff: noqa: E501  # tables: a case on a line

from __future__ import annotations

import json

import pytest
from jsonschema import Draft202012Validator
from jsonschema_specifications import REGISTRY

from deepinfer.structured_output.errors import SchemaError
from deepinfer.structured_output.json_grammar import json_grammar
from deepinfer.structured_output.keywords import ANNOTATIONS, REFUSED, children
from deepinfer.structured_output.source import GrammarSource
from tests.support.grammars import Compiled

S, I = {"type": "string"}, {"type": "integer"}  # noqa: E741


def obj(properties: dict | None = None, **more: object) -> dict:
    return {"type": "object"} | ({} if properties is None else {"properties": properties}) | more


# name: (schema, accepted texts, rejected texts)
KEYWORDS: dict[str, tuple[object, list[str], list[str]]] = {
    "true": (True, ["1", "null", '"a"', "[[]]", '{"a": {"b": [1.5e3]}}'], ["", "nul", "[1,]", "{1: 2}", "01"]),
    "empty": ({}, ["-0.5", "[1,2]", '{"":null}'], ["+1", ".5", "1.", "[1 ,2]", " 1", "1 ", "NaN", "Infinity"]),
    "no-type": ({"minimum": 3}, ["3", '"x"', "null", "[]", "{}"], ["2", "2.9", "-3"]),
    "type": (S, ['""', '"é😀"', '"\\n"', '"\\u0001"', '"/"'], ['"\n"', '"\x01"', '"\\u0041"', '"\\/"', '"\\x"', "a"]),
    "type-list": ({"type": ["integer", "null"]}, ["1", "null"], ["true", '"1"', "1.5"]),
    "integer": (I, ["0", "-7", "12345678901234567890"], ["-0", "00", "1.0", "1e3", "1" * 21]),
    "number": ({"type": "number"}, ["0", "-0.0", "1.25", "1e-07", "1.5E+300", "9e307"], ["1e308", "00.1", "1e", "15e3"]),
    "boolean": ({"type": "boolean"}, ["true", "false"], ["True", "0", "null"]),
    "enum": ({"enum": ["a", 1, None, 1.5, {"b": [1]}, "é\n"]},
             ['"a"', "1", "null", "1.5", '{"b": [1]}', '{"b":[1]}', '"é\\n"'], ['"b"', "true", "2", "1.50", '{"b": []}']),
    "enum-and-type": ({"enum": ["a", 1, None], "type": "string"}, ['"a"'], ["1", "null"]),
    "enum-and-length": ({"enum": ["a", "abc", 7], "maxLength": 2}, ['"a"', "7"], ['"abc"']),
    "enum-and-pattern": ({"enum": ["a1", "b", 5], "pattern": "^[a-z]$"}, ['"b"', "5"], ['"a1"']),
    "enum-and-properties": ({"enum": [{"a": 1}, {"a": "x"}], "properties": {"a": I}}, ['{"a": 1}'], ['{"a": "x"}']),
    "const": ({"const": {"b": 1.0, "a": "é"}}, ['{"b": 1.0, "a": "é"}'], ['{"a": "é", "b": 1.0}', "{}"]),
    "const-true": ({"const": True, "enum": [1, True]}, ["true"], ["1"]),
    "minLength": ({"type": "string", "minLength": 2}, ['"ab"', '"é😀"', '"\\"\\\\"'], ['"a"', '"😀"', '"\\n"']),
    "maxLength": ({"type": "string", "maxLength": 2}, ['""', '"é😀"', '"/ "'], ['"abc"', '"a\\nb"', '"\\n"', '"\\""']),
    "minLength-long": ({"type": "string", "minLength": 9}, ['"123456789"', '"123456789\\n"'], ['"12345678"']),
    "pattern-long": ({"type": "string", "pattern": "^[a-z]{2,3000}(-[a-z]{1,9000})?$"}, ['"ab"', f'"{"x" * 3000}-y"'],
                     ['"a"', f'"{"x" * 3001}"', '"ab-"']),
    "maxLength-0": ({"type": "string", "maxLength": 0}, ['""'], ['"a"']),
    "pattern": ({"type": "string", "pattern": "b+"}, ['"abba"', '"b"', '"\\nb\\n"'], ['"a"', '""']),
    "pattern-anchored": ({"type": "string", "pattern": '^a"\\\\$'}, ['"a\\"\\\\"'], ['"a\\""', '"xa\\"\\\\"']),
    "pattern-and-length": ({"type": "string", "pattern": "^a*b$", "minLength": 2, "maxLength": 3},
                           ['"ab"', '"aab"'], ['"b"', '"aaab"', '"aa"']),
    "pattern-and-format": ({"type": "string", "pattern": "^2", "format": "date"}, ['"2024-01-31"'],
                           ['"1999-01-31"', '"2023-02-29"', '"2"']),
    "format-and-length": ({"type": "string", "format": "email", "maxLength": 8}, ['"a@b.com"'], ['"aaaa@b.com"', '"a@b"']),
    "minimum": ({"type": "integer", "minimum": -12, "maximum": 105}, ["-12", "0", "99", "105"], ["-13", "106", "-20"]),
    "exclusive": ({"type": "integer", "exclusiveMinimum": 3, "exclusiveMaximum": 5}, ["4"], ["3", "5"]),
    "exclusive-fraction": ({"type": "integer", "exclusiveMinimum": 2.5, "maximum": 4.5}, ["3", "4"], ["2", "5"]),
    "both-minimums": ({"type": "number", "minimum": 3, "exclusiveMinimum": 3}, ["3.5", "4"], ["3", "3.0", "2"]),
    "number-range": ({"type": "number", "minimum": -1.5, "exclusiveMaximum": 0.25},
                     ["-1.5", "-1.50", "-0.75", "0", "0.0", "0.2499"], ["-1.51", "0.25", "0.250", "-2", "1e-3"]),
    "number-above": ({"type": "number", "exclusiveMinimum": 0}, ["0.5", "1", "12345.678"], ["0", "0.0", "-1", "-0.1"]),
    "huge-bound": ({"type": "number", "maximum": 1e300}, ["99999999999999999999", "-1.5"], ["1e301"]),
    "multipleOf": ({"type": "integer", "multipleOf": 7}, ["0", "49", "-7", "700000000000000000"], ["1", "48", "-8", "07"]),
    "multipleOf-range": ({"type": "integer", "multipleOf": 5, "exclusiveMinimum": 3, "maximum": 20},
                         ["5", "20"], ["0", "3", "4", "25"]),
    "multipleOf-number": ({"type": "number", "multipleOf": 2.0}, ["4"], ["3", "4.5"]),
    "int32": ({"type": "integer", "format": "int32"}, ["2147483647", "-2147483648"], ["2147483648", "-2147483649"]),
    "properties": (obj({"a": I, "b": S}), ["{}", '{"a": 1}', '{"b":"x"}', '{"a": 1,"b": ""}'],
                   ['{"b": "x", "a": 1}', '{"a": "x"}', '{"c": 1}', '{"a": 1, "a": 2}', '{"a": 1,}', '{,"a": 1}']),
    "required": (obj({"a": I, "b": S, "c": I}, required=["b"]),
                 ['{"b": ""}', '{"a": 1, "b": "", "c": 2}'], ["{}", '{"a": 1}', '{"a": 1, "c": 2}']),
    "required-alone": (obj(required=["a"]), ['{"a": null}', '{"a": 1, "x": 2}'], ["{}", '{"x": 2}', '{"a": 1, "a": 2}']),
    "required-undeclared": (obj({"a": I}, required=["z"]), ['{"z": []}', '{"a": 1, "z": 0}'], ['{"a": 1}', "{}"]),
    "required-additional": (obj(required=["z"], additionalProperties=I), ['{"z": 1, "y": 2}'], ['{"z": ""}', '{"y": 2}']),
    "additional-false": (obj({"a": I}, additionalProperties=False), ["{}", '{"a": 1}'], ['{"b": 1}']),
    "additional-schema": (obj({"a": S}, additionalProperties=I), ['{"a": "x", "b": 1, "ab": 2}', '{"": 0}'],
                          ['{"a": 1}', '{"b": "x"}', '{"b": 1, "a": "x"}']),
    "additional-true": (obj({"a": S}, additionalProperties=True), ['{"b": null}'], ['{"a": null}']),
    "property-false": (obj({"a": False}, additionalProperties=I), ['{"b": 1}', "{}"], ['{"a": 1}']),
    "patternProperties": (obj(patternProperties={"^i_": I, "^s_": S}), ['{"i_": 1, "s_x": ""}', "{}"],
                          ['{"i_": ""}', '{"s_": 1}', '{"x": 1}']),
    "patternProperties-overlap": (obj(patternProperties={"a": {"minimum": 3}, "b": {"type": "integer", "maximum": 5}}),
                                  ['{"ab": 4, "b": 1, "a": "x"}'], ['{"ab": 2}', '{"ba": 6}', '{"ba": "x"}']),
    "patternProperties-declared": (obj({"ax": I}, patternProperties={"^a": {"minimum": 3}}), ['{"ax": 3}', '{"ay": "x"}'],
                                   ['{"ax": 2}', '{"ay": 1}', '{"ax": "x"}']),
    "patternProperties-rest": (obj(patternProperties={"^a": I}, additionalProperties=S), ['{"a": 1, "b": ""}'],
                               ['{"a": ""}', '{"b": 1}']),
    "propertyNames": (obj(propertyNames={"pattern": "^[ab]+$", "maxLength": 2}), ['{"ab": 1}', "{}"], ['{"c": 1}', '{"aba": 1}']),
    "propertyNames-enum": (obj(propertyNames={"enum": ["p", "q"]}, minProperties=2), ['{"p": 1, "q": 2}'],
                           ['{"p": 1}', '{"p": 1, "p": 2}', '{"r": 1}']),
    "propertyNames-declared": (obj({"abc": I, "x": I}, propertyNames={"maxLength": 2}), ['{"x": 1}'], ['{"abc": 1}']),
    "minProperties": (obj({"a": I, "b": I, "c": I}, minProperties=2), ['{"a": 1, "c": 1}', '{"a": 1, "b": 1, "c": 1}'],
                      ["{}", '{"b": 1}']),
    "minProperties-open": (obj(minProperties=1), ['{"x": 1}'], ["{}"]),
    "minProperties-mixed": (obj({"a": I, "b": I}, required=["a"], minProperties=2, additionalProperties=I),
                            ['{"a": 1, "b": 1}', '{"a": 1, "x": 1}', '{"a": 1, "x": 1, "y": 1}'], ['{"a": 1}']),
    "maxProperties": (obj({"a": I, "b": I, "c": I}, maxProperties=2), ["{}", '{"b": 1, "c": 1}'], ['{"a": 1, "b": 1, "c": 1}']),
    "maxProperties-open": (obj({"a": I}, maxProperties=2, additionalProperties=I), ['{"a": 1, "x": 1}', '{"x": 1, "y": 1}'],
                           ['{"a": 1, "x": 1, "y": 1}', '{"x": 1, "y": 1, "z": 1}']),
    "maxProperties-0": (obj({"a": I}, maxProperties=0), ["{}"], ['{"a": 1}']),
    "dependentRequired": (obj({"a": I, "b": I}, dependentRequired={"a": ["b"]}), ["{}", '{"b": 1}', '{"a": 1, "b": 1}'],
                          ['{"a": 1}']),
    "dependentSchemas": (obj({"a": I, "b": I}, dependentSchemas={"a": {"properties": {"b": {"minimum": 5}}}}),
                         ['{"b": 1}', '{"a": 1, "b": 5}', '{"a": 1}'], ['{"a": 1, "b": 4}']),
    "items": ({"type": "array", "items": I}, ["[]", "[1]", "[1, 2,3]"], ['["a"]', "[1,]", "[,1]", "[1 2]"]),
    "items-false": ({"type": "array", "items": False}, ["[]"], ["[1]"]),
    "prefixItems": ({"type": "array", "prefixItems": [I, S]}, ["[]", "[1]", '[1, "a"]'], ['["a"]', '[1, "a", 2]', "[1, 2]"]),
    "prefixItems-rest": ({"type": "array", "prefixItems": [I], "items": S, "minItems": 2, "maxItems": 3},
                         ['[1, "a"]', '[1, "a", "b"]'], ["[1]", '[1, "a", "b", "c"]', "[1, 2]"]),
    "minItems": ({"type": "array", "items": I, "minItems": 2}, ["[1, 2]", "[1, 2, 3]"], ["[]", "[1]"]),
    "maxItems": ({"type": "array", "items": I, "maxItems": 2}, ["[]", "[1]", "[1, 2]"], ["[1, 2, 3]"]),
    "uniqueItems": ({"type": "array", "items": {"enum": ["a", "b", 1]}, "uniqueItems": True, "minItems": 1},
                    ['["b", "a"]', '[1, "a", "b"]'], ["[]", '["a", "a"]', '["a", "b", "a"]']),
    "uniqueItems-one": ({"type": "array", "items": S, "uniqueItems": True, "maxItems": 1}, ["[]", '["a"]'], ['["a", "b"]']),
    "uniqueItems-false": ({"type": "array", "items": I, "uniqueItems": False}, ["[1, 1]"], ['["a"]']),
    "unevaluatedProperties": (obj(allOf=[obj({"a": I})], unevaluatedProperties=False), ['{"a": 1}'], ['{"b": 1}', '{"a": ""}']),
    "unevaluatedItems": ({"type": "array", "prefixItems": [I], "unevaluatedItems": False}, ["[1]"], ["[1, 2]"]),
    "anyOf": ({"anyOf": [I, {"type": "null"}]}, ["1", "null"], ['"a"']),
    "anyOf-siblings": ({"anyOf": [S, {"type": "null"}], "maxLength": 2}, ['"ab"', "null"], ['"abc"', "1"]),
    "anyOf-required": (obj({"a": I, "b": I}, anyOf=[{"required": ["a"]}, {"required": ["b"]}]),
                       ['{"a": 1}', '{"b": 1}', '{"a": 1, "b": 2}'], ["{}"]),
    "oneOf": ({"oneOf": [{"type": "integer", "maximum": 3}, {"type": "integer", "minimum": 5}, S]}, ["3", "5", '"4"'], ["4"]),
    "oneOf-kinds": ({"oneOf": [obj({"k": {"const": "a"}, "v": I}, required=["k"]), obj({"k": {"const": "b"}}, required=["k"])]},
                    ['{"k": "a", "v": 1}', '{"k": "b"}'], ['{"k": "b", "v": 1}', '{"v": 1}']),
    "oneOf-patterns": ({"type": "string", "oneOf": [{"pattern": "^a"}, {"pattern": "^b"}]}, ['"ab"', '"b"'], ['"c"', '""']),
    "allOf": ({"allOf": [I, {"minimum": 3}, {"multipleOf": 2}, {"multipleOf": 3}]}, ["6", "12"], ["3", "4", "0", '"a"']),
    "allOf-objects": ({"allOf": [obj({"a": I}, required=["a"]), {"properties": {"b": S, "a": {"maximum": 5}}}]},
                      ['{"a": 1}', '{"a": 5, "b": ""}'], ['{"a": 6}', "{}", '{"a": 1, "c": 1}']),
    "allOf-closed": ({"allOf": [obj({"a": I}, additionalProperties=False), obj({"a": I, "b": I})]}, ['{"a": 1}'], ['{"b": 1}']),
    "allOf-arrays": ({"allOf": [{"type": "array", "items": I}, {"prefixItems": [{"minimum": 3}], "minItems": 1}]},
                     ["[3]", "[3, 1]"], ["[2]", '["a"]', "[]"]),
    "$ref": ({"$ref": "#/$defs/a", "$defs": {"a": I}}, ["1"], ['"a"']),
    "$ref-siblings": ({"$ref": "#/$defs/a", "maxLength": 2, "$defs": {"a": S}}, ['"ab"'], ['"abc"', "1"]),
    "$ref-escapes": ({"$ref": "#/$defs/a~1b%20c~0", "$defs": {"a/b c~": I}}, ["1"], ['"a"']),
    "definitions": ({"$ref": "#/definitions/a", "definitions": {"a": I}}, ["1"], ['"a"']),
    "$ref-root": (obj({"a": {"$ref": "#"}}), ["{}", '{"a": {"a": {}}}'], ['{"a": 1}', '{"b": {}}']),
    "$ref-id": ({"$id": "https://a.b/c", "$ref": "https://a.b/c#/$defs/a", "$defs": {"a": I}}, ["1"], ["null"]),
    "recursion": ({"$ref": "#/$defs/n", "$defs": {"n": {"type": "array", "items": {"$ref": "#/$defs/n"}, "maxItems": 2}}},
                  ["[]", "[[], [[]]]"], ["[1]", "[[], [], []]"]),
    "endless-branch": ({"anyOf": [{"type": "null"}, obj({"a": {"$ref": "#/$defs/e"}}, required=["a"])],
                        "$defs": {"e": obj({"b": {"$ref": "#/$defs/e"}}, required=["b"])}}, ["null"], ['{"a": {}}', "{}"]),
    "annotations": ({"title": "t", "description": "d", "default": 3, "examples": [1], "deprecated": True, "$comment": "c",
                     "readOnly": True, "x-order": 3, "type": "integer"}, ["1"], ['"a"']),
}  # fmt: skip


@pytest.mark.parametrize("name", KEYWORDS)
def test_enforced(name: str):
    schema, accepted, rejected = KEYWORDS[name]
    grammar = Compiled(GrammarSource("grammar", json_grammar(schema)))
    judge = Draft202012Validator(schema, format_checker=Draft202012Validator.FORMAT_CHECKER)
    for text in accepted:
        assert grammar.accepts(text), text
        assert grammar.accepts(text, as_bytes=True), text
        assert judge.is_valid(json.loads(text)), text
    for text in rejected:
        assert not grammar.accepts(text), text


ROOT = "#: no value satisfies"
# name: (schema, start of the message)
BAD: dict[str, tuple[object, str]] = {
    **{word: ({"type": "object", "properties": {"a/b": {word: {}}}}, f"#/properties/a~1b/{word}: '{word}' ") for word in REFUSED},
    "unknown": ({"items": {"maxLenght": 3}}, "#/items/maxLenght: 'maxLenght' is not a keyword that can be enforced: did you mean 'maxLength'"),
    "unknown-far": ({"qqqqqqq": 3}, "#/qqqqqqq: 'qqqqqqq' is not a keyword that can be enforced"),
    "multipleOf": ({"multipleOf": 0.01}, "#/multipleOf: is 0.01: whole numbers up to 1000"),
    "multipleOf-0": ({"multipleOf": 0}, "#/multipleOf: must be a number above 0, got 0"),
    "multipleOf-large": ({"allOf": [{"multipleOf": 999}, {"multipleOf": 1000}]}, "#: multiples of 999000: up to 1000"),
    "uniqueItems": ({"type": "array", "items": S, "uniqueItems": True}, "#/uniqueItems: can be enforced for items of an enum"),
    "uniqueItems-many": ({"type": "array", "items": {"enum": list(range(7))}, "uniqueItems": True}, "#/uniqueItems: can be"),
    "minProperties": (obj({"a": I}, minProperties=2, additionalProperties=True), "#/minProperties: is 2: keys that are not declared"),
    "oneOf": ({"oneOf": [I, {"type": "number"}]}, "#/oneOf/1: may hold together with #/oneOf/0"),
    "oneOf-objects": ({"oneOf": [obj({"a": I}), obj({"b": I})]}, "#/oneOf/1: may hold together"),
    "unevaluatedProperties": (obj(unevaluatedProperties=I), "#/unevaluatedProperties: only true and false"),
    "format": ({"type": "string", "format": "iri"}, "#/format: 'iri' cannot be enforced: date, time"),
    "format-number": ({"type": "integer", "format": "date"}, "#/format: 'date' cannot be enforced: int32"),
    "pattern": ({"properties": {"a": {"pattern": "(?=a)"}}}, "#/properties/a/pattern: '(?=a)', position 0: lookaheads"),
    "patternProperties": ({"patternProperties": {"\\b": {}}}, "#/patternProperties/\\b: '\\\\b', position 0: word"),
    "pattern-states": ({"pattern": "^a*$", "type": "string", "maxLength": 5000}, "#/pattern: needs more than 2000 states"),
    "pattern-repeats": ({"pattern": "a{20000}"}, "#/pattern: 'a{20000}', position 1: repeats 20000 times: at most 10000"),
    "maxLength": ({"maxLength": 10**7}, "#/maxLength: is 10000000: at most 1000000 can be enforced"),
    "maxItems": ({"maxItems": 10**6}, "#/maxItems: is 1000000: at most 100000 can be enforced"),
    "minItems-negative": ({"minItems": -1}, "#/minItems: must be an integer of at least 0, got -1"),
    "minLength-fraction": ({"minLength": 1.5}, "#/minLength: must be an integer"),
    "minimum-text": ({"minimum": "3"}, "#/minimum: must be a number, got '3'"),
    "exclusiveMinimum-draft4": ({"minimum": 3, "exclusiveMinimum": True}, "#/exclusiveMinimum: must be a number, got True"),
    "bound-digits": ({"type": "number", "exclusiveMinimum": 0.1234567890123456}, "#: the bound 0.1234567890123456 has too many digits"),
    "type": ({"type": "float"}, "#/type: must be one or several of null, boolean"),
    "type-empty": ({"type": []}, "#/type: must be one"),
    "type-twice": ({"type": ["null", "null"]}, "#/type: must be a list without repeats"),
    "enum": ({"enum": []}, "#/enum: must be a non-empty list"),
    "required": (obj(required="a"), "#/required: must be a list of names"),
    "required-twice": (obj(required=["a", "a"]), "#/required: must be a list without repeats"),
    "properties": ({"properties": []}, "#/properties: must be an object of schemas"),
    "property": ({"properties": {"a": 3}}, "#/properties/a: a schema is an object or a boolean, got 3"),
    "items-list": ({"items": [I]}, "#/items: a list of schemas is called prefixItems"),
    "anyOf": ({"anyOf": {}}, "#/anyOf: must be a non-empty list of schemas"),
    "anyOf-item": ({"anyOf": [I, None]}, "#/anyOf/1: a schema is an object or a boolean, got None"),
    "$ref-remote": ({"$ref": "https://example.com/a"}, "#/$ref: 'https://example.com/a' leads outside"),
    "$ref-anchor": ({"$ref": "#name"}, "#/$ref: '#name' names an anchor"),
    "$ref-nowhere": ({"items": {"$ref": "#/$defs/x"}}, "#/items/$ref: '#/$defs/x' leads to no schema"),
    "$ref-loop": ({"anyOf": [{"$ref": "#"}, I]}, "#: refers to itself"),
    "$ref-chain": ({"$ref": "#/$defs/0", "$defs": {str(i): {"$ref": f"#/$defs/{i + 1}"} for i in range(150)} | {"150": I}},
                   "#/$defs/99: more than 100 references"),
    "$id": ({"items": {"$id": "x"}}, "#/items/$id: '$id' is supported at the root only"),
    "$schema": ({"$schema": "http://json-schema.org/draft-04/schema#"}, "#/$schema: the dialect"),
    "false": (False, ROOT),
    "contradiction": ({"allOf": [I, S]}, ROOT),
    "empty-range": ({"type": "integer", "minimum": 3, "maximum": 2}, ROOT),
    "endless": (obj({"a": {"$ref": "#"}}, required=["a"]), ROOT),
    "required-false": (obj({"a": False}, required=["a"]), ROOT),
    "dependencies-many": (obj(dependentRequired={str(i): ["x"] for i in range(7)}), "#/dependentRequired: 7 dependencies: at most 6"),
    "patterns-combined": ({"allOf": [obj(patternProperties={"a": I}), obj(additionalProperties=S)]},
                          "#/allOf/0/patternProperties/a: cannot be combined"),
    "counted": (obj({f"p{i}": I for i in range(200)}, minProperties=150), "#/minProperties: counts 200 properties up to 150: 100 can"),
    "optional-run": (obj({f"p{i}": I for i in range(300)}, required=["p50"]), "#/properties: has 249 optional properties in a row"),
    "grammar-size": ({"enum": ["x" * 1000 + str(i) for i in range(500)]}, "#: becomes a grammar of more than 400000"),
    "pairs": ({"allOf": [{"anyOf": [{"maxLength": i} for i in range(500)]}] * 2}, "#/allOf/1: its combinations multiply out"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_refused_by_path(name: str):
    schema, message = BAD[name]
    with pytest.raises(SchemaError) as caught:
        json_grammar(schema)
    assert str(caught.value).startswith(message)
    assert str(caught.value).startswith(f"{caught.value.path}: ")


def test_every_keyword_of_the_standard_has_its_case():
    """Those of all supported drafts: enforced with texts above, refused by path, or without a meaning."""
    drafts = ("draft-06", "draft-07", "draft/2019-09", "draft/2020-12")
    metaschemas = [REGISTRY.contents(uri) for uri in REGISTRY if any(draft in uri for draft in drafts)]
    standard = {word for schema in metaschemas for word in schema.get("properties", {})}
    assert len(metaschemas) >= 14 and len(standard) > 50
    tried: set[str] = set()
    todo = [schema for schema, *_ in KEYWORDS.values()]
    while todo:
        schema = todo.pop()
        tried |= set(schema) if isinstance(schema, dict) else set()
        todo += [child for _, child in children(schema, "#")]
    assert standard <= tried | set(REFUSED) | ANNOTATIONS, "enforced without a case, or of no kind"
    assert not tried & set(REFUSED)


def nested(depth: int) -> dict:
    schema: dict = {}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


def test_depth_and_number_of_schemas_are_bounded():
    assert Compiled(GrammarSource("grammar", json_grammar(nested(90)))).accepts("[" * 90 + "1" + "]" * 90)
    with pytest.raises(SchemaError, match="nested too deeply: at most 100 levels"):
        json_grammar(nested(120))
    wide: dict = dict(S)
    for _ in range(14):
        wide = obj({"a": wide, "b": wide})
    with pytest.raises(SchemaError, match="too many schemas: at most 20000"):
        json_grammar(wide)


def test_a_document_of_shared_definitions_stays_small():
    """Fifty levels with two references each: 2**50 places, fifty rules."""
    levels = {
        f"a{i}": obj({"x": {"$ref": f"#/$defs/a{i + 1}"}, "y": {"$ref": f"#/$defs/a{i + 1}"}})
        for i in range(50)
    }
    text = json_grammar({"$ref": "#/$defs/a0", "$defs": levels | {"a50": I}})
    assert len(text) < 30_000


def test_errors_survive_pickling():
    import pickle

    error = SchemaError("#/not", "cannot be enforced")
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), again.path, str(again)) == (SchemaError, "#/not", "#/not: cannot be enforced")
