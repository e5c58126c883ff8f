"""Prefill of long prompts, exact and with bounded replay: time to the first token.

    python examples/benchmark_replay.py [--model DIR] [--keep K] [--lengths N ...] [--threads N]

Each prompt runs alone, without drafts; the best of `--repeats` runs, the modes taking turns.
"""

from __future__ import annotations

import argparse
import platform
import time
from pathlib import Path

import torch

from deepinfer import LLM, SamplingParams, Settings

BUNDLED = Path(__file__).resolve().parent / "v41-tiny"
MODES = ("off", "compact")


def prefill_seconds(llm: LLM, length: int) -> float:
    """Time to the first token of one prompt."""
    prompt = [0, *(100 + place % 3000 for place in range(length - 1))]
    start = time.perf_counter()
    llm.generate(prompt, SamplingParams(temperature=0.0, max_tokens=1), use_tqdm=False)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=str(BUNDLED), help="checkpoint; the bundled model by default")
    parser.add_argument("--keep", type=int, default=140, help="tokens kept (default 140)")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 4000], help="prompt tokens")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print(f"{platform.machine()}, {args.threads} threads, torch {torch.__version__}, K = {args.keep}")
    engines = {
        mode: LLM(
            args.model,
            settings=Settings(replay_mode=mode, replay_keep_tokens=args.keep, num_draft_tokens=0),
            max_num_seqs=1,
            max_model_len=max(args.lengths) + 1,
        )
        for mode in MODES
    }
    for length in args.lengths:
        times = {mode: [] for mode in MODES}
        for _ in range(args.repeats):
            for mode, llm in engines.items():
                times[mode].append(prefill_seconds(llm, length))
        best = {mode: min(seconds) for mode, seconds in times.items()}
        shown = ", ".join(f"{mode} {seconds * 1e3:.0f} ms" for mode, seconds in best.items())
        print(f"{length:>6} tokens: {shown}, {best['off'] / best['compact']:.2f} times as fast")
    for llm in engines.values():
        llm.close()


if __name__ == "__main__":
    main()
