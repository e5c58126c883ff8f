"""Outputs that follow a JSON schema, an expression, a grammar, or a grammar behind a trigger.

python examples/structured_output.py [--model DIR_OR_HUB_ID] [--temperature T] [--seed N]

Every prompt asks for something else than its shape allows; the output follows the shape all the same.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

from deepinfer import LLM, SamplingParams, StructuredOutputsParams

HERE = Path(__file__).resolve().parent
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "city": {"enum": ["Paris", "Rome", "Vienna", "elsewhere"]},
    },
    "required": ["name", "age", "city"],
}
GRAMMAR = 'root ::= "answer=" ("yes" | "no") ";level=" [1-3]'
NUMBER = "[A-Z]{2}-[0-9]{3}"


def requests(llm: LLM, options: dict[str, Any]) -> dict[str, tuple[str, SamplingParams]]:
    """Prompt and parameters by name; `so_args` and `structured_outputs` are two ways to say the same."""
    tokenizer = llm.get_tokenizer()
    trigger = tokenizer.encode(" Number: ", add_special_tokens=False)
    bound = tokenizer.encode(".", add_special_tokens=False)[-1]
    return {
        "json": (
            "Anna is 7 years old. She lives in Paris. Write a long story about her, no JSON.",
            SamplingParams(so_args={"schema_type": "json", "schema": PERSON}, **options),
        ),
        "regex": (
            "Tell me a long story without any numbers.",
            SamplingParams(structured_outputs=StructuredOutputsParams(regex=NUMBER), **options),
        ),
        "ebnf": (
            "Who are you? Do not answer yes or no.",
            SamplingParams(so_args={"schema_type": "ebnf", "schema": GRAMMAR}, **options),
        ),
        # Free text up to the first full stop, which forces the trigger; the expression begins behind it.
        "trigger": (
            "Tell me a story about a fox.",
            SamplingParams(
                so_args={
                    "schema_type": "regex",
                    "schema": NUMBER,
                    "trigger_token_ids": trigger,
                    "bound_token_id": bound,
                },
                **options,
            ),
        ),
    }


def check(name: str, text: str) -> bool:
    """Whether an output has the shape that was asked for."""
    if name == "json":
        value = json.loads(text)
        return list(value) == ["name", "age", "city"] and 0 <= value["age"] <= 120
    expression = {
        "regex": NUMBER,
        "ebnf": "answer=(yes|no);level=[1-3]",
        "trigger": rf"(?s).*\. Number: {NUMBER}",
    }[name]
    return re.fullmatch(expression, text) is not None


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", metavar="DIR|HUB_ID", default=os.environ.get("DEEPINFER_HF_MODEL_DIR"))
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default)")
    parser.add_argument("--seed", type=int, help="makes sampling repeatable")
    options = parser.parse_args(argv)
    sampling = {"temperature": options.temperature, "seed": options.seed, "max_tokens": 128}
    with LLM(options.model or str(HERE / "v41-tiny"), max_model_len=1024) as llm:
        rows = requests(llm, sampling)
        conversations = [[{"role": "user", "content": prompt}] for prompt, _ in rows.values()]
        outputs = llm.chat(conversations, [params for _, params in rows.values()], use_tqdm=False)
    num_wrong = 0
    for (name, (prompt, _)), output in zip(rows.items(), outputs):
        sample = output.outputs[0]
        is_right = sample.finish_reason == "stop" and check(name, sample.text)
        num_wrong += not is_right
        print(f"{name}: {prompt}\n    {sample.text}\n    {'follows its shape' if is_right else sample}")
    return 1 if num_wrong else 0


if __name__ == "__main__":
    sys.exit(main())
