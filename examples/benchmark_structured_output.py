"""What structured output costs: compile time, mask and advance time per token, throughput with and without.

    python examples/benchmark_structured_output.py [--model DIR] [--batch N] [--tokens N] [--repeats N]
                                                   [--drafts N] [--threads N]

First table: each grammar alone, without a model. A matcher walks through it by random tokens; times are those
of the one core that does it. Second table: requests of the batch follow grammars, or all of them, or none;
the same prompts, forced to the same number of tokens, in turns. `waited` is what masks added to a step; the
rest of their time was hidden under the model's. The output is Markdown.
"""

from __future__ import annotations

import argparse
import json
import logging
import platform
import random
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from deepinfer import LLM, SamplingParams, Settings
from deepinfer.structured_output.matcher import SequenceMatcher
from deepinfer.structured_output.request import GrammarSpec

HERE = Path(__file__).resolve().parent
LABEL = {"type": "string", "pattern": "^[a-z][a-z0-9-]{0,30}$"}
ITEM = {
    "type": "object",
    "properties": {
        "id": {"type": "integer", "minimum": 1},
        "title": {"type": "string", "maxLength": 200},
        "state": {"enum": ["open", "closed", "stale"]},
        "created": {"type": "string", "format": "date-time"},
        "labels": {"type": "array", "items": LABEL, "maxItems": 8},
        "parent": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
    },
    "required": ["id", "title", "state", "created", "labels", "parent"],
}
GRAMMARS = {
    "free string": GrammarSpec("json", '{"type":"string"}'),
    "record": GrammarSpec("json", json.dumps(ITEM)),
    "list of records": GrammarSpec("json", json.dumps({"type": "array", "items": ITEM})),
    "any JSON object": GrammarSpec("json_object", ""),
    "date expression": GrammarSpec("regex", "[0-9]{4}-[01][0-9]-[0-3][0-9]"),
    "choice of 100": GrammarSpec("choice", json.dumps([f"option {place}" for place in range(100)])),
    "arithmetic": GrammarSpec("ebnf", 'root ::= t (("+" | "-") t)*\nt ::= [0-9]+ | "(" root ")"'),
}
WALK_TOKENS = 400
# Endless, so that every request gets all its tokens.
ENDLESS = {"schema_type": "regex", "schema": "([a-z]{3,9} [0-9]{2};)+!{9}"}


def walk(matcher: SequenceMatcher, eos: int, chosen: random.Random) -> tuple[float, float, int]:
    """Seconds of masks and of advancing, and the number of tokens, over several outputs."""
    masks = advances = 0.0
    for place in range(WALK_TOKENS):
        start = time.perf_counter()
        words = matcher.fill()
        masks += time.perf_counter() - start
        bits = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
        tokens = bits[bits != eos]
        if len(tokens) == 0 or place % 100 == 99:
            matcher.reset()
            continue
        token = int(chosen.choice(tokens))
        start = time.perf_counter()
        matcher.accept(token)
        advances += time.perf_counter() - start
    return masks, advances, WALK_TOKENS


def table_of_grammars(llm: LLM) -> None:
    builder = llm.llm_engine.grammar_builder
    start = time.perf_counter()
    builder.request(GrammarSpec("regex", "start")).result(120)
    print(f"The first grammar: {time.perf_counter() - start:.2f} s, with the start of the builder.\n")
    print("| Grammar | Compile, ms | Kept, KiB | Mask, us per token | Advance, us per token |")
    print("|---|---|---|---|---|")
    eos, size = llm.get_tokenizer().eos_token_id, llm.llm_engine.vocab_size
    for name, spec in GRAMMARS.items():
        before = builder.num_bytes
        start = time.perf_counter()
        grammar = builder.request(spec).result(120)
        milliseconds = 1e3 * (time.perf_counter() - start)
        while builder.num_building:
            time.sleep(0.001)
        masks, advances, count = walk(SequenceMatcher(grammar, size, [eos]), eos, random.Random(0))
        kept = (builder.num_bytes - before) / 1024
        each = f"{1e6 * masks / count:.1f} | {1e6 * advances / count:.1f}"
        print(f"| {name} | {milliseconds:.0f} | {kept:.0f} | {each} |")


def run(llm: LLM, num_structured: int, options: argparse.Namespace) -> tuple[float, float, float]:
    """Tokens per second; milliseconds per step of masks, and of these waited for."""
    prompts = [[5, 6, 7 + row] for row in range(options.batch)]
    params = []
    for row in range(options.batch):
        shape: dict[str, Any] = {"so_args": ENDLESS} if row < num_structured else {"ignore_eos": True}
        params.append(SamplingParams(max_tokens=options.tokens, temperature=1.0, seed=row, **shape))
    before, start = llm.get_stats(), time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds, after = time.perf_counter() - start, llm.get_stats()
    tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    steps = after.num_steps - before.num_steps
    masks = 1e3 * (after.grammar_seconds - before.grammar_seconds) / steps
    waited = 1e3 * (after.grammar_wait_seconds - before.grammar_wait_seconds) / steps
    return tokens / seconds, masks, waited


def table_of_throughput(llm: LLM, options: argparse.Namespace) -> None:
    counts = {"none": 0, "half": options.batch // 2, "all": options.batch}
    results: dict[str, list[tuple[float, float, float]]] = {name: [] for name in counts}
    for count in counts.values():
        run(llm, count, options)
    for _ in range(options.repeats):
        for name in random.Random(len(results["none"])).sample(list(counts), len(counts)):
            results[name].append(run(llm, counts[name], options))
    print(f"\nBatch {options.batch}, {options.tokens} tokens each, {options.drafts} drafts.\n")
    print("| Structured | Tokens/s | Against none | Masks, ms per step | Waited, ms per step |")
    print("|---|---|---|---|---|")
    for name, values in results.items():
        ratios = [value[0] / none[0] for value, none in zip(values, results["none"])]
        rate, masks, waited = (statistics.mean(column) for column in zip(*values))
        print(f"| {name} | {rate:,.0f} | {statistics.mean(ratios) - 1:+.1%} | {masks:.2f} | {waited:.2f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=str(HERE / "v41-tiny"))
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=96, help="output tokens of a request")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--drafts", type=int, default=0)
    parser.add_argument("--threads", type=int, default=0, help="0 takes the library's default")
    options = parser.parse_args()
    logging.disable(logging.INFO)
    if options.threads:
        torch.set_num_threads(options.threads)
    settings = Settings(num_draft_tokens=options.drafts)
    length = options.tokens + 32
    print(f"{platform.machine()}, torch {torch.__version__}, {torch.get_num_threads()} threads\n")
    with LLM(options.model, settings=settings, max_num_seqs=options.batch, max_model_len=length) as llm:
        table_of_grammars(llm)
        table_of_throughput(llm, options)


if __name__ == "__main__":
    main()
