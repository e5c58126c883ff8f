"""so_args and structured_outputs: what is accepted, what is refused and in which words."""

from __future__ import annotations

import pickle
from dataclasses import FrozenInstanceError

import numpy as np
import pytest

from deepinfer import SamplingParams, StructuredOutputsParams
from deepinfer.structured_output.request import MAX_SOURCE_BYTES, GrammarSpec

SCHEMA = {"type": "object", "properties": {"b": {"const": "é"}, "a": {}}}
TEXT = '{"type":"object","properties":{"b":{"const":"é"},"a":{}}}'


GOOD = [
    ({"schema_type": "json", "schema": SCHEMA}, GrammarSpec("json", TEXT)),
    ({"schema_type": "json", "schema": TEXT.replace(":", " : ")}, GrammarSpec("json", TEXT)),
    ({"schema_type": "json", "schema": True}, GrammarSpec("json", "true")),
    ({"schema_type": "json_object"}, GrammarSpec("json_object", "")),
    ({"schema_type": "json_object", "schema": "{}"}, GrammarSpec("json_object", "")),
    ({"schema_type": "regex", "schema": "a+"}, GrammarSpec("regex", "a+")),
    ({"schema_type": "ebnf", "schema": 'root ::= "a"'}, GrammarSpec("ebnf", 'root ::= "a"')),
    ({"schema_type": "choice", "schema": ["no", "yes", "no"]}, GrammarSpec("choice", '["no","yes"]')),
    ({"schema_type": "structural_tag", "schema": {"type": "structural_tag"}},
     GrammarSpec("structural_tag", '{"type":"structural_tag"}')),
    ({"schema_type": "regex", "schema": "a", "trigger_token_ids": [5, np.int64(0)], "bound_token_id": 0},
     GrammarSpec("regex", "a", (5, 0), 0)),
    ({"schema_type": "regex", "schema": "a", "trigger_token_ids": None, "bound_token_id": None},
     GrammarSpec("regex", "a")),
    ({"schema_type": "regex", "schema": "a", "trigger_token_ids": []}, GrammarSpec("regex", "a")),
]  # fmt: skip


@pytest.mark.parametrize(("args", "spec"), GOOD)
def test_so_args(args, spec):
    params = SamplingParams(so_args=args)
    assert params.grammar == spec and params.has_structured_output
    for again in (
        params.clone(n=2),
        pickle.loads(pickle.dumps(params)),
        eval(repr(params).replace("mappingproxy", "")),
    ):
        assert again.grammar == spec


OPTIONS = [
    ("json", SCHEMA, GrammarSpec("json", TEXT)),
    ("json", TEXT, GrammarSpec("json", TEXT)),
    ("regex", "a+", GrammarSpec("regex", "a+")),
    ("grammar", 'root ::= "a"', GrammarSpec("ebnf", 'root ::= "a"')),
    ("choice", ["no", "yes"], GrammarSpec("choice", '["no","yes"]')),
    ("json_object", True, GrammarSpec("json_object", "")),
    (
        "structural_tag",
        {"type": "structural_tag"},
        GrammarSpec("structural_tag", '{"type":"structural_tag"}'),
    ),
]


@pytest.mark.parametrize(("name", "value", "spec"), OPTIONS)
def test_structured_outputs(name, value, spec):
    option = StructuredOutputsParams(**{name: value})
    assert option.spec == spec
    assert hash(option) == hash(StructuredOutputsParams(**{name: value}))
    assert pickle.loads(pickle.dumps(option)) == option == eval(repr(option))
    for params in (
        SamplingParams(structured_outputs=option),
        SamplingParams(structured_outputs={name: value}),
    ):
        assert params.grammar == spec and params.has_structured_output
        assert pickle.loads(pickle.dumps(params.clone(top_k=3))).grammar == spec
    with pytest.raises(FrozenInstanceError):
        option.json = "{}"


def test_without_structured_output():
    assert SamplingParams().grammar is None
    assert SamplingParams(so_args=GOOD[0][0]).clone(so_args=None).grammar is None
    with pytest.raises(ValueError, match=r"exactly one of json, regex.*got none"):
        StructuredOutputsParams(json_object=False)


def test_a_schema_is_copied():
    schema = {"properties": {"a": {"type": "string"}}}
    params = SamplingParams(so_args={"schema_type": "json", "schema": schema})
    option = StructuredOutputsParams(json=schema)
    schema["properties"]["a"]["type"] = "integer"
    for kept in (params, params.clone(n=2), SamplingParams(structured_outputs=option)):
        assert kept.grammar.source == '{"properties":{"a":{"type":"string"}}}'


def test_cache_keys():
    same = [SamplingParams(so_args=GOOD[i][0]).grammar.cache_key for i in (0, 1)]
    same.append(StructuredOutputsParams(json=SCHEMA).spec.cache_key)
    assert len(set(same)) == 1
    specs = [
        GrammarSpec("json", TEXT),
        GrammarSpec("regex", TEXT),
        GrammarSpec("json", '{"type":"object","properties":{"a":{},"b":{"const":"é"}}}'),  # another order
    ]
    assert len({spec.cache_key for spec in specs}) == 3
    assert GrammarSpec("regex", "a", (1,), 2).cache_key == GrammarSpec("regex", "a").cache_key


LOOP: dict = {}
LOOP["a"] = LOOP
DEEP = "[" * 100_000
R = {"schema_type": "regex", "schema": "a"}
BAD = [
    ("json", TypeError, "so_args must be a dict, got str"),
    ({}, ValueError, "'schema_type' as one of json, json_object"),
    ({"schema_type": "yaml", "schema": ""}, ValueError, "'schema_type' as one of .* got 'yaml'"),
    (R | {"serialized": "x"}, ValueError, "no key 'serialized'; it knows"),
    (R | {"bound_token_ids": [1]}, ValueError, "no key 'bound_token_ids' .did you mean 'bound_token_id'"),
    (R | {3: 1}, ValueError, "no key 3"),
    ({"schema_type": "regex"}, ValueError, "'schema' must be a string, got None"),
    ({"schema_type": "regex", "schema": ""}, ValueError, "'schema' is empty"),
    ({"schema_type": "ebnf", "schema": b"x"}, ValueError, "'schema' must be a string"),
    ({"schema_type": "json", "schema": "{"}, ValueError, "not JSON: .* at line 1 column 2"),
    ({"schema_type": "json", "schema": "[]"}, ValueError, "as text or as a dict"),
    ({"schema_type": "json", "schema": '{"a":1,"b":0,"a":2}'}, ValueError, "key 'a' twice"),
    ({"schema_type": "json", "schema": '{"const":NaN}'}, ValueError, "NaN, which is not JSON"),
    ({"schema_type": "json", "schema": {"const": float("inf")}}, ValueError, "cannot be written as JSON"),
    ({"schema_type": "json", "schema": {"const": {1, 2}}}, ValueError, "set is not a JSON value"),
    ({"schema_type": "json", "schema": LOOP}, ValueError, "written as JSON"),
    ({"schema_type": "json", "schema": DEEP}, ValueError, "nested too deeply"),
    ({"schema_type": "json", "schema": {"const": "\ud800"}}, ValueError, "lone surrogate at character 10"),
    ({"schema_type": "regex", "schema": "a" * (MAX_SOURCE_BYTES + 1)}, ValueError, "at most 1048576"),
    ({"schema_type": "json_object", "schema": SCHEMA}, ValueError, "use schema_type 'json'"),
    ({"schema_type": "choice", "schema": "yes"}, ValueError, "list of strings"),
    ({"schema_type": "choice", "schema": []}, ValueError, "at least one"),
    ({"schema_type": "choice", "schema": ["a", 3]}, ValueError, r"\[1\] must be a non-empty string, got 3"),
    ({"schema_type": "choice", "schema": ["a", ""]}, ValueError, r"\[1\] must be a non-empty"),
    ({"schema_type": "structural_tag", "schema": "true"}, ValueError, "structural tag as JSON text"),
    (R | {"trigger_token_ids": 5}, TypeError, "trigger_token_ids must be a list"),
    (R | {"trigger_token_ids": [1, -1]}, ValueError, r"trigger_token_ids\[1\]"),
    (R | {"trigger_token_ids": [True]}, TypeError, r"trigger_token_ids\[0\]"),
    (R | {"trigger_token_ids": [1] * 5000}, ValueError, "at most 4096"),
    (R | {"trigger_token_ids": [1], "bound_token_id": -1}, ValueError, "bound_token_id"),
    (R | {"trigger_token_ids": [1], "bound_token_id": [1]}, TypeError, "bound_token_id"),
    (R | {"bound_token_id": 0}, ValueError, "bound_token_id=0 needs a non-empty trigger_token_ids"),
]


@pytest.mark.parametrize("case", range(len(BAD)))
def test_refused_so_args(case):
    args, error, words = BAD[case]
    with pytest.raises(error, match=words):
        SamplingParams(so_args=args)


def test_refused_structured_outputs():
    with pytest.raises(ValueError, match=r"exactly one of .* got json, regex"):
        StructuredOutputsParams(json="{}", regex="a")
    with pytest.raises(TypeError, match=r"no option 'regexp' .did you mean 'regex'"):
        StructuredOutputsParams(regexp="a")
    with pytest.raises(TypeError, match="must be a StructuredOutputsParams"):
        SamplingParams(structured_outputs="{}")
    with pytest.raises(ValueError, match=r"structured_outputs.choice\[0\]"):
        SamplingParams(structured_outputs={"choice": [1]})
    with pytest.raises(ValueError, match="not both"):
        SamplingParams(so_args=R, structured_outputs={"regex": "a"})
