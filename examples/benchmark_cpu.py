"""Speed of the CPU backend: decode at several batch sizes, prefill, and what batch invariance costs.

    python examples/benchmark_cpu.py [--model DIR] [--drafts K] [--threads N]

Every figure is the best of `--repeats` runs on a model that is already loaded; token counts are checked.
Decode figures are output tokens per second over all requests of the batch, prompts excluded.
"""

from __future__ import annotations

import argparse
import platform
import time
from pathlib import Path

import torch

from deepinfer import LLM, SamplingParams, Settings

BATCHES = (1, 4, 16, 64)
BUNDLED = Path(__file__).resolve().parent / "v41-tiny"


def decode_rate(llm: LLM, batch: int, num_tokens: int, repeats: int) -> float:
    """Output tokens per second of `batch` equal requests, from the first token on."""
    prompts = [[0, *range(100 + row, 131 + row)] for row in range(batch)]
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    best = 0.0
    for _ in range(repeats):
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert all(len(output.outputs[0].token_ids) == num_tokens for output in outputs)
        start = min(output.metrics.ttft_ms for output in outputs)
        seconds = (max(output.metrics.total_ms for output in outputs) - start) / 1e3
        best = max(best, batch * (num_tokens - 1) / seconds)
    return best


def prefill_seconds(llm: LLM, length: int, repeats: int) -> float:
    """Time to the first token of one prompt."""
    prompt = [0, *(100 + place % 3000 for place in range(length - 1))]
    params = SamplingParams(temperature=0.0, max_tokens=1)
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        llm.generate(prompt, params, use_tqdm=False)
        times.append(time.perf_counter() - start)
    return min(times)


def forced_seconds(llm: LLM, length: int) -> float:
    """Time to put the same number of tokens into the model one at a time, as forced output."""
    tokens = [100 + place % 3000 for place in range(length - 1)]
    params = SamplingParams(
        temperature=0.0, max_tokens=length, ignore_eos=True, golden_token_ids=tokens, detokenize=False
    )
    start = time.perf_counter()
    output = llm.generate([0], params, use_tqdm=False)[0].outputs[0]
    assert output.token_ids[: length - 1] == tokens
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=str(BUNDLED), help="checkpoint; the bundled model by default")
    parser.add_argument(
        "--drafts", type=int, default=0, help="draft tokens per step (default 0: plain decoding)"
    )
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--tokens", type=int, default=64, help="output tokens of a request")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    settings = Settings(num_draft_tokens=args.drafts)
    print(
        f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}, {args.threads} threads, "
        f"torch {torch.__version__}, {args.drafts} drafts"
    )
    rates: dict[bool, dict[int, float]] = {}
    for invariant in (True, False):
        # Every repetition computes everything.
        options = {"batch_invariant": invariant, "enable_prefix_caching": False}
        with LLM(args.model, settings=settings, **options) as llm:
            decode_rate(llm, 1, 8, 1)  # warm up
            rates[invariant] = {b: decode_rate(llm, b, args.tokens, args.repeats) for b in BATCHES}
            if invariant:
                prefill, forced = prefill_seconds(llm, 1024, args.repeats), forced_seconds(llm, 1024)
    print("| batch | output tok/s | relative to batch 1 | tok/s without batch invariance |")
    print("|---|---|---|---|")
    for batch in BATCHES:
        rate = rates[True][batch]
        print(f"| {batch} | {rate:.0f} | {rate / rates[True][1]:.1f} | {rates[False][batch]:.0f} |")
    print(
        f"\nprefill of 1,024 tokens: {prefill:.3f} s ({1024 / prefill:.0f} tok/s); "
        f"token by token: {forced:.2f} s; ratio {forced / prefill:.1f}"
    )


if __name__ == "__main__":
    main()
