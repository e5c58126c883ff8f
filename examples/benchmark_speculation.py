"""What speculation brings: tokens per step and per second for every draft length, against none.

    python examples/benchmark_speculation.py [--batch 1 4 16 64] [--modes MODE ...] [--temperature T]
                                             [--repeats N] [--threads N]

Every mode answers the same requests, taken in turns from the questions, stories, prose and code beside
the model, each to a length of its own, and has to give the same tokens. A round runs all modes in random
order, so that a machine that slows down slows all of them; the ratio to no speculation is taken inside a
round and given with its 95 % confidence interval over the rounds. Prefill is part of the time; a run before
the first round is not. The output is a table in Markdown.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import platform
import random
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from deepinfer import LLM, SamplingParams, Settings

HERE = Path(__file__).resolve().parent
MODES: dict[str, dict[str, Any]] = {
    "off": {"num_draft_tokens": 0},
    **{f"fixed {k}": {"num_draft_tokens": k} for k in range(1, 6)},
    "varlen": {"num_draft_tokens": 5, "use_draft_budget": True},
}
REFILLS = 4  # requests of a run for each place of the batch, so that it is full most of the time
MIN_REQUESTS = 12
# Quantiles of Student's t for a two-sided 95 % interval, by degrees of freedom.
T95 = {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 7: 2.36, 8: 2.31, 9: 2.26, 14: 2.14, 19: 2.09}


def mixed_prompts(llm: LLM) -> list[list[int]]:
    """Token ids: a question, a story, a piece of prose or code, the next question, and so on."""
    texts = json.loads((HERE / "prompts.json").read_text())
    tokenizer = llm.get_tokenizer()
    groups = [
        [tokenizer.apply_chat_template([{"role": "user", "content": text}]) for text in texts["questions"]],
        [tokenizer.encode(text) for text in texts["stories"]],
        [tokenizer.encode(text) for text in texts["prose_and_code"]],
    ]
    rows = itertools.zip_longest(*groups)
    return [list(prompt) for prompt in itertools.chain.from_iterable(rows) if prompt is not None]


def run(llm: LLM, prompts: list[list[int]], params: list[SamplingParams]) -> tuple[float, list[list[int]]]:
    """Output tokens per second, and the tokens."""
    start = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - start
    tokens = [output.outputs[0].token_ids for output in outputs]
    return sum(map(len, tokens)) / seconds, tokens


def output_lengths(mean: int, count: int) -> list[int]:
    """Half to three halves of `mean`, in no order.

    Requests that all end in one step would suit plain decoding, which then always runs whole batches.
    """
    steps = 16
    return [max(1, round(mean * (0.5 + (7 * row % (steps + 1)) / steps))) for row in range(count)]


def interval(values: list[float]) -> float:
    """Half the width of the 95 % confidence interval of the mean."""
    if len(values) < 2:
        return float("nan")
    freedom = max(n for n in T95 if n <= len(values) - 1)
    return T95[freedom] * statistics.stdev(values) / len(values) ** 0.5


def measure(args: argparse.Namespace, batch: int) -> None:
    """Prints the rows of one batch size."""
    engines = {
        name: LLM(
            args.model,
            settings=Settings(**settings),
            max_num_seqs=batch,
            max_model_len=512,
            enable_prefix_caching=False,  # every round computes everything
            disable_log_stats=True,
        )
        for name, settings in MODES.items()
        if name in args.modes
    }
    every = mixed_prompts(engines["off"])
    count = max(MIN_REQUESTS, REFILLS * batch)
    prompts = list(itertools.islice(itertools.cycle(every), count))
    params = [
        SamplingParams(temperature=args.temperature, seed=row, max_tokens=length, ignore_eos=True)
        for row, length in enumerate(output_lengths(args.tokens, count))
    ]
    rates: dict[str, list[float]] = {name: [] for name in engines}
    _, expected = run(engines["off"], prompts, params)
    for llm in engines.values():  # the first run warms up, and teaches what a step takes and a draft is worth
        run(llm, prompts, params)
    for _ in range(args.repeats):
        for name in random.sample(list(engines), len(engines)):
            rate, tokens = run(engines[name], prompts, params)
            assert tokens == expected, f"{name}: other tokens than without speculation"
            rates[name].append(rate)
    for name, llm in engines.items():
        stats = llm.llm_engine.stats
        ratios = [rate / off for rate, off in zip(rates[name], rates["off"], strict=True)]
        accepted = stats.accepted_by_position / stats.verified_by_position.clip(1)
        gain = (
            ""
            if name == "off"
            else f"{100 * (statistics.fmean(ratios) - 1):+.0f} % ± {100 * interval(ratios):.0f}"
        )
        positions = " ".join(f"{share:.2f}" for share in accepted)
        print(
            f"| {batch} | {name} | {stats.tokens_per_step:.2f} | {statistics.median(rates[name]):.0f} "
            f"| {gain} | {positions} |",
            flush=True,
        )
        llm.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", default=str(HERE / "v41-tiny"), help="checkpoint; the bundled one by default"
    )
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4, 16, 64], help="requests at once")
    parser.add_argument(
        "--modes",
        nargs="+",
        default=list(MODES),
        choices=list(MODES),
        metavar="MODE",
        help=f"what to compare with off: {', '.join(MODES)} (default all)",
    )
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--tokens", type=int, default=64, help="mean output tokens of a request")
    parser.add_argument("--repeats", type=int, default=5, help="rounds over all modes")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    args.modes = ["off", *args.modes]
    torch.set_num_threads(args.threads)
    logging.disable(logging.INFO)
    print(
        f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}, {args.threads} threads, "
        f"{args.tokens} tokens in the mean at temperature {args.temperature:g}, {args.repeats} rounds\n\n"
        "| Batch | Drafts | Tokens per step | Tokens/s | Against none | Accepted of verified, by position |\n"
        "|---|---|---|---|---|---|",
        flush=True,
    )
    for batch in args.batch:
        measure(args, batch)


if __name__ == "__main__":
    main()
