"""Structured requests that several tests of the engine make."""

from __future__ import annotations

from typing import Any

from deepinfer.sampling_params import SamplingParams
from tests.support.engines import prompt_of

RECORD = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 16},
        "tags": {"type": "array", "items": {"enum": ["red", "größe", "x"]}, "maxItems": 3},
        "size": {"type": ["integer", "null"], "minimum": -9, "maximum": 900},
    },
    "required": ["name", "tags", "size"],
}
ITEMS = 'root ::= item (";" item){2,5}\nitem ::= [a-z]+ "=" ("yes" | "no")'
SHAPES: dict[str, dict[str, Any] | None] = {
    "json": {"schema_type": "json", "schema": RECORD},
    "regex": {"schema_type": "regex", "schema": "([a-z]{3,8} ){2,6}[0-9]{4}!"},
    "free": None,
    "ebnf": {"schema_type": "ebnf", "schema": ITEMS},
    "choice": {"schema_type": "choice", "schema": ["the first of them", "the second", "größer"]},
    "triggered": {"schema_type": "regex", "schema": "[0-9]{9}", "trigger_token_ids": [2000, 2001],
                  "bound_token_id": 29},
    "also free": None,
    "object": {"schema_type": "json_object"},
}  # fmt: skip

PROMPT = list(prompt_of(9, 4))


def regex(expression: str, max_tokens: int = 40, **options: Any) -> SamplingParams:
    args = {"schema_type": "regex", "schema": expression}
    return SamplingParams(**{"max_tokens": max_tokens, "temperature": 0, "so_args": args, **options})
