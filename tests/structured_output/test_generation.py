"""What models write under a grammar: one whose weights are random, so that the grammar does all the work, and
the bundled trained one."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from deepinfer.entrypoints.llm import LLM
from deepinfer.outputs import RequestOutput
from deepinfer.sampling_params import SamplingParams
from deepinfer.settings import Settings
from deepinfer.structured_output.request import StructuredOutputsParams
from tests.support.engines import assert_idle, generate, make_llm
from tests.support.schemas import all_schemas

# Random weights like no token better than another, so at temperature 1 every number and free text goes on
# until chance ends it: with 300 tokens all but a few outputs of these schemas do.
MAX_TOKENS = 300
SHARE_THAT_ENDS = 0.9


@pytest.fixture(scope="module")
def random_model() -> Iterator[LLM]:
    with make_llm("tiny-quant", max_num_seqs=96, settings=Settings(num_draft_tokens=2)) as llm:
        yield llm


@pytest.fixture(scope="module")
def trained_model() -> Iterator[LLM]:
    with make_llm("v41-tiny") as llm:
        yield llm


def so_args(kind: str, schema: Any = None, **options: Any) -> dict[str, Any]:
    return {"schema_type": kind, "schema": schema, **options}


@pytest.mark.slow
def test_schemas_on_a_random_model(random_model: LLM):
    """At least 300 schemas, some of them under two seeds."""
    schemas = all_schemas()
    assert len(schemas) >= 300
    runs = [(name, schema, 1) for name, schema in schemas] + [(*pair, 2) for pair in schemas[::12]]
    params = [
        SamplingParams(max_tokens=MAX_TOKENS, seed=seed, so_args=so_args("json", schema))
        for _, schema, seed in runs
    ]
    outputs = generate(random_model, [[5, 6, 100 + row % 50] for row in range(len(runs))], params)
    num_ended, wrong = 0, []
    for (name, schema, seed), output in zip(runs, outputs, strict=True):
        sample = output.outputs[0]
        assert sample.finish_reason in ("stop", "length"), f"{name}: {sample.error}"
        if sample.finish_reason == "length":
            assert len(sample.token_ids) == MAX_TOKENS
            continue
        num_ended += 1
        whole = random_model.get_tokenizer().decode(sample.token_ids[:-1], skip_special_tokens=False)
        assert whole == sample.text, f"{name}: a special token hides in it"
        try:
            judge = Draft202012Validator(schema, format_checker=Draft202012Validator.FORMAT_CHECKER)
            judge.validate(json.loads(sample.text))
        except Exception as error:
            wrong.append(f"{name}, seed {seed}: {sample.text[:200]!r}: {str(error)[:200]}")
    assert not wrong, "\n".join(wrong)
    assert num_ended >= SHARE_THAT_ENDS * len(runs), f"{num_ended} of {len(runs)} ended"
    stats = random_model.get_stats()
    assert stats.num_accepted > 0 and stats.num_verified > stats.num_accepted
    assert random_model.llm_engine.grammar_builder.stats.num_failed == 0


EXPRESSIONS = [
    "[A-Z]{2}-[0-9]{3}",
    "(yes|no|maybe)( (yes|no)){0,2}",
    "[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])",
    "(é|ü|漢字){1,5}!?",
    "\\$[1-9][0-9]{0,3}\\.[0-9]{2}",
    "[^a-zA-Z]{3,9}",
    ".{1,12}",
    "\\s?[a-f]+(,[a-f]+){2}",
    "😀{2}",
    "#[0-9a-fA-F]{6}",
]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_expressions_on_a_random_model(random_model: LLM, temperature: float):
    params = [
        SamplingParams(
            max_tokens=120, temperature=temperature, seed=seed, so_args=so_args("regex", expression)
        )
        for expression in EXPRESSIONS
        for seed in range(4)
    ]
    outputs = generate(random_model, [[9, 77]] * len(params), params)
    ended = [output for output in outputs if output.outputs[0].finish_reason == "stop"]
    assert len(ended) >= SHARE_THAT_ENDS * len(outputs)
    for param, output in zip(params, outputs, strict=True):
        text = output.outputs[0].text
        if output.outputs[0].finish_reason == "stop":
            assert re.fullmatch(param.so_args["schema"], text), f"{param.so_args['schema']} {text!r}"
    texts = {output.outputs[0].text for output in ended}
    assert len(texts) > 20 or temperature == 0, "seeds differ"


ARITHMETIC = """
root ::= sum
sum ::= product (("+" | "-") product)?
product ::= value ("*" value)?
value ::= [0-9] | "(" [0-9] "+" [0-9] ")"
"""


def is_arithmetic(text: str) -> bool:
    """A recogniser by hand."""
    place = 0

    def take(characters: str) -> bool:
        nonlocal place
        if place < len(text) and text[place] in characters:
            place += 1
            return True
        return False

    def value() -> bool:
        digits = "0123456789"
        return take(digits) or (take("(") and take(digits) and take("+") and take(digits) and take(")"))

    def product() -> bool:
        return value() and (not take("*") or value())

    return product() and (not take("+-") or product()) and place == len(text)


def test_grammars_on_a_random_model(random_model: LLM):
    assert is_arithmetic("(1+2)*3-4") and not is_arithmetic("1+2+3") and not is_arithmetic("1*")
    params = [
        SamplingParams(max_tokens=60, seed=seed, so_args=so_args("ebnf", ARITHMETIC)) for seed in range(40)
    ]
    outputs = generate(random_model, [[9, 78]] * len(params), params)
    texts = [output.outputs[0].text for output in outputs]
    assert all(output.outputs[0].finish_reason == "stop" for output in outputs)
    assert all(map(is_arithmetic, texts)), texts
    assert {"*", "-"} <= set("".join(texts)), "its rules are used"


def test_the_other_kinds_on_a_random_model(random_model: LLM):
    tag = {
        "type": "structural_tag",
        "format": {
            "type": "tag",
            "begin": "<a>",
            "content": {
                "type": "json_schema",
                "json_schema": {"type": "integer", "minimum": 5, "maximum": 9},
            },
            "end": "</a>",
        },
    }
    choices = ["first", "second one", "dritte größe", 'fourth"\\\n', "first one"]
    kinds = [so_args("choice", choices), so_args("structural_tag", tag), so_args("json_object")]
    params = [SamplingParams(max_tokens=250, seed=seed, so_args=kind) for kind in kinds for seed in range(12)]
    outputs = [each.outputs[0] for each in generate(random_model, [[9, 79]] * len(params), params)]
    chosen, tagged, objects = outputs[:12], outputs[12:24], outputs[24:]
    assert {each.text for each in chosen} <= set(choices) and len({each.text for each in chosen}) >= 3
    assert all(re.fullmatch("<a>[5-9]</a>", each.text) for each in tagged)
    whole = [json.loads(each.text) for each in objects if each.finish_reason == "stop"]
    assert whole and all(isinstance(each, dict) for each in whole)


PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "city": {"type": "string", "maxLength": 20},
    },
    "required": ["name", "age", "city"],
}


def chat(llm: LLM, question: str, params: SamplingParams) -> RequestOutput:
    (output,) = llm.chat([{"role": "user", "content": question}], params, use_tqdm=False)
    assert_idle(llm)
    return output


@pytest.mark.parametrize(
    ("question", "expected"),
    [
        (
            "Answer in JSON. Anna is 7 years old. She lives in Paris.",
            {"name": "Anna", "age": 7, "city": "Paris"},
        ),
        (
            "Answer in JSON. Tom is 9 years old. He lives in Rome.",
            {"name": "Tom", "age": 9, "city": "Rome"},
        ),
    ],
)
def test_the_trained_model_fills_in_the_fields(trained_model: LLM, question: str, expected: dict[str, Any]):
    params = SamplingParams(
        temperature=0, max_tokens=64, structured_outputs=StructuredOutputsParams(json=PERSON)
    )
    sample = chat(trained_model, question, params).outputs[0]
    assert (json.loads(sample.text), sample.finish_reason) == (expected, "stop")
    assert sample.token_ids[-1] == trained_model.get_tokenizer().eos_token_id and "<" not in sample.text


OPPOSITES = [
    ("Tell me a long story. Do not write JSON.", so_args("json", PERSON), None),
    ("Tell me a long story without any number.", so_args("regex", "[A-Z]{2}-[0-9]{3}"), "[A-Z]{2}-[0-9]{3}"),
    (
        "Who are you? Do not answer yes or no.",
        so_args("ebnf", 'root ::= "answer=" ("yes" | "no") ";level=" [1-3]'),
        "answer=(yes|no);level=[1-3]",
    ),
    ("What is the capital of France?", so_args("choice", ["Berlin", "Vienna"]), "Berlin|Vienna"),
]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(("question", "args", "expression"), OPPOSITES, ids=lambda value: "")
def test_prompts_that_ask_for_the_opposite_obey(
    trained_model: LLM, question: str, args: dict[str, Any], expression: str | None, temperature: float
):
    params = SamplingParams(temperature=temperature, seed=3, max_tokens=128, so_args=args)
    sample = chat(trained_model, question, params).outputs[0]
    assert sample.finish_reason == "stop"
    if expression is None:
        Draft202012Validator(PERSON).validate(json.loads(sample.text))
    else:
        assert re.fullmatch(expression, sample.text), sample.text


def test_free_text_until_the_trigger(trained_model: LLM):
    """The model writes its own beginning; the bound token then forces the trigger, and the grammar begins."""
    tokenizer = trained_model.get_tokenizer()
    question = "Tell me a story about a fox."
    free = chat(trained_model, question, SamplingParams(temperature=0, max_tokens=30)).outputs[0]
    bound = free.token_ids[12]
    start = free.token_ids.index(bound) + 1
    trigger = tokenizer.encode(" In JSON: ", add_special_tokens=False)
    args = so_args("json", PERSON, trigger_token_ids=trigger, bound_token_id=bound)
    sample = chat(
        trained_model, question, SamplingParams(temperature=0, max_tokens=120, so_args=args)
    ).outputs[0]
    assert sample.token_ids[:start] == free.token_ids[:start]
    assert sample.token_ids[start : start + len(trigger)] == trigger
    text = tokenizer.decode(sample.token_ids[start + len(trigger) :], skip_special_tokens=True)
    Draft202012Validator(PERSON).validate(json.loads(text))
    assert sample.finish_reason == "stop" and sample.text.endswith(text)
    # Without a bound the trigger has to come by itself: here it is what the model wrote anyway.
    args = so_args("regex", "[0-9]{3}", trigger_token_ids=free.token_ids[5:9])
    sample = chat(
        trained_model, question, SamplingParams(temperature=0, max_tokens=60, so_args=args)
    ).outputs[0]
    assert sample.token_ids[:9] == free.token_ids[:9]
    assert re.fullmatch("[0-9]{3}", tokenizer.decode(sample.token_ids[9:], skip_special_tokens=True))
    # A trigger that never comes leaves the output alone.
    args = so_args("regex", "[0-9]{3}", trigger_token_ids=[2000, 2001, 2002])
    sample = chat(
        trained_model, question, SamplingParams(temperature=0, max_tokens=30, so_args=args)
    ).outputs[0]
    assert sample == free
