"""What state that is kept saves: samples of one prompt, prefix hits, the KV store, and bounded replay.

    python examples/benchmark_caches.py [--runs R] [--threads N] [--model DIR] [--directory D] [--json FILE]
                                        [--only PART ...]

Four parts, each of R runs whose cases take turns; every run has prompts of its own, so nothing is found that
is not meant to be found.

    samples    16 samples of a prompt of 1,024 tokens, beside 16 prompts of that length
    ttft       time to the first token of 1,024 and 4,095 tokens: cold, found in the engine's cache, and found
               in a store by an engine that has never seen the prompt
    store      a prefix of 4,096 tokens put and loaded, beside plain files with the same bytes on that disk
    replay     a prefill of 4,095 tokens: exact, and with bounded replay by either mode

One line of JSON for each case (all runs, median, least and most), then tables with medians and spreads.
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from benchmark_kv_store import Prefix, measure_directory, measure_plain, measure_store

from deepinfer import LLM, SamplingParams, Settings
from deepinfer.kv_transfer.directory_store import DirectoryStore
from deepinfer.kv_transfer.memory_store import MemoryStore
from deepinfer.kv_transfer.store import KVStore

MODEL = Path(__file__).resolve().parent / "v41-tiny"
NUM_SAMPLES, SAMPLED_PROMPT, SAMPLED_TOKENS = 16, 1024, 16
PROMPTS = (1024, 4095)  # the bundled model ends at 4,096, the token to come included
STORED_PROMPT, REPLAYED_PROMPT = 4096, 4095
KEEP_TOKENS = 140
SPACE = 1  # tokens behind the longest prompt


@dataclass
class Case:
    """One row of a table.

    Attributes:
        part, name: where it stands.
        unit: of its values.
        runs: one value each.
    """

    part: str
    name: str
    unit: str
    runs: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.runs)

    def as_json(self) -> str:
        summary = {"median": self.median, "least": min(self.runs), "most": max(self.runs)}
        values = {name: round(value, 3) for name, value in summary.items()}
        runs = [round(value, 3) for value in self.runs]
        return json.dumps({"part": self.part, "case": self.name, "unit": self.unit, **values, "runs": runs})


class Cases:
    """Collects the runs of one part, in the order of their first appearance."""

    def __init__(self, part: str) -> None:
        self._part = part
        self._cases: dict[str, Case] = {}

    def add(self, name: str, unit: str, value: float) -> None:
        self._cases.setdefault(name, Case(self._part, name, unit)).runs.append(value)

    def __iter__(self) -> Iterator[Case]:
        return iter(self._cases.values())


class Prompts:
    """Prompts that nobody has seen before."""

    def __init__(self) -> None:
        self._rng = np.random.default_rng(0)

    def new(self, length: int) -> list[int]:
        return self._rng.integers(16, 1800, length).tolist()


def make_llm(args: argparse.Namespace, settings: Settings | None = None, **options: object) -> LLM:
    options = {"max_num_seqs": 2, "max_model_len": max(PROMPTS) + SPACE, **options}
    return LLM(args.model, settings=settings or Settings(num_draft_tokens=0), **options)


def milliseconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return 1e3 * (time.perf_counter() - start)


def first_token(llm: LLM, prompt: list[int], num_cached: int) -> float:
    """Milliseconds to the first token of a prompt of which so much has to be found."""
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    outputs = []
    value = milliseconds(lambda: outputs.extend(llm.generate([prompt], params, use_tqdm=False)))
    llm.llm_engine.settle()
    assert outputs[0].num_cached_tokens == num_cached, f"{outputs[0].num_cached_tokens=} {num_cached=}"
    return value


def measure_samples(args: argparse.Namespace, prompts: Prompts) -> Cases:
    cases = Cases("samples")
    length = SAMPLED_PROMPT + SAMPLED_TOKENS + SPACE
    params = SamplingParams(temperature=1.0, max_tokens=SAMPLED_TOKENS, ignore_eos=True, seed=1)
    with make_llm(args, max_num_seqs=NUM_SAMPLES, max_model_len=length) as llm:

        def run(requests: list[list[int]], params: SamplingParams) -> tuple[float, int]:
            before = llm.llm_engine.stats.num_prefill_tokens
            value = milliseconds(lambda: llm.generate(requests, params, use_tqdm=False))
            return value, llm.llm_engine.stats.num_prefill_tokens - before

        run([prompts.new(SAMPLED_PROMPT)], params)
        for _ in range(args.runs):
            value, rows = run([prompts.new(SAMPLED_PROMPT)], params.clone(n=NUM_SAMPLES))
            cases.add(f"{NUM_SAMPLES} samples of one prompt", "ms", value)
            cases.add("rows of their prefill", "rows", rows)
            value, rows = run([prompts.new(SAMPLED_PROMPT) for _ in range(NUM_SAMPLES)], params)
            cases.add(f"{NUM_SAMPLES} prompts", "ms", value)
            cases.add("rows of their prefill, each its own", "rows", rows)
    return cases


def measure_ttft(args: argparse.Namespace, prompts: Prompts) -> Cases:
    cases = Cases("ttft")
    directory = tempfile.mkdtemp(dir=args.directory)
    stores: dict[str, KVStore] = {"memory": MemoryStore(1 << 30), "directory": DirectoryStore(directory)}
    try:
        with make_llm(args) as llm:
            first_token(llm, prompts.new(max(PROMPTS)), 0)
            for length in PROMPTS * args.runs:
                prompt = prompts.new(length)
                cases.add(f"{length} tokens, cold", "ms", first_token(llm, prompt, 0))
                found = (length - 1) // 128 * 128
                cases.add(f"{length} tokens, in the cache", "ms", first_token(llm, prompt, found))
        for name, store in stores.items():
            with make_llm(args, kv_store=store) as one, make_llm(args, kv_store=store) as other:
                for length in PROMPTS * args.runs:
                    prompt = prompts.new(length)
                    first_token(one, prompt, 0)
                    one.llm_engine.kv_store.flush()
                    found = (length - 1) // 128 * 128
                    cases.add(f"{length} tokens, in a {name}", "ms", first_token(other, prompt, found))
    finally:
        for store in stores.values():
            store.close()
        shutil.rmtree(directory)
    return cases


def measure_stores(args: argparse.Namespace, _: Prompts) -> Cases:
    cases = Cases("store")
    prefix = Prefix(STORED_PROMPT)
    ways: dict[str, Callable[[Path], dict[str, float]]] = {
        "one plain file": lambda directory: measure_plain(directory, [prefix.num_bytes]),
        "a plain file per entry": lambda directory: measure_plain(directory, prefix.sizes),
        "directory": lambda directory: measure_directory(prefix, directory),
        "memory": lambda _: measure_store(prefix, MemoryStore(2 * prefix.num_bytes)),
    }
    for _run in range(args.runs):
        for name, measure in ways.items():
            directory = Path(tempfile.mkdtemp(dir=args.directory))
            try:
                times = measure(directory)
            finally:
                shutil.rmtree(directory)
            for what in ("put", "put, flushed", "get", "get, cold"):
                if what in times:
                    cases.add(f"{name}: {what}", "MB/s", prefix.num_bytes / times[what] / 1e6)
    return cases


def measure_replay(args: argparse.Namespace, prompts: Prompts) -> Cases:
    cases = Cases("replay")
    engines = {}
    try:
        for mode in ("off", "mask", "compact"):
            settings = Settings(replay_mode=mode, replay_keep_tokens=KEEP_TOKENS, num_draft_tokens=0)
            engines[mode] = make_llm(args, settings, enable_prefix_caching=False)
            first_token(engines[mode], prompts.new(REPLAYED_PROMPT), 0)
        for _ in range(args.runs):
            prompt = prompts.new(REPLAYED_PROMPT)
            for mode, llm in engines.items():
                cases.add(mode, "ms", first_token(llm, prompt, 0))
    finally:
        for llm in engines.values():
            llm.close()
    return cases


PARTS: dict[str, Callable[[argparse.Namespace, Prompts], Cases]] = {
    "samples": measure_samples,
    "ttft": measure_ttft,
    "store": measure_stores,
    "replay": measure_replay,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--model", default=str(MODEL), help="checkpoint; the bundled model by default")
    parser.add_argument("--directory", default=None, help="of stores and files, not the temporary folder")
    parser.add_argument("--json", type=argparse.FileType("w"), default=sys.stdout, help="for the JSON lines")
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS))
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    prompts, parts = Prompts(), {}
    for name in args.only:
        parts[name] = PARTS[name](args, prompts)
        for case in parts[name]:
            print(case.as_json(), file=args.json, flush=True)
    print(f"\n{platform.machine()}, {args.threads} threads, torch {torch.__version__}, {args.runs} runs")
    for name, cases in parts.items():
        print(f"\n| {name} | median | least | most | |\n|---|---|---|---|---|")
        for case in cases:
            cells = [f"{value:,.0f}" for value in (case.median, min(case.runs), max(case.runs))]
            print("|", " | ".join([case.name, *cells, case.unit]), "|")


if __name__ == "__main__":
    main()
