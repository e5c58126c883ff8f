"""The equality matrix: speculation, asynchronous scheduling, batching and preemption change no result.

    python -m tests.engine.matrix            the covering subset that the tests run
    python -m tests.engine.matrix --all      every cell, all bundled prompts, 128 tokens each

A cell is one way to run a workload. Its results (tokens, text, log-probabilities, why they end) have to be,
bit for bit, those of the plain engine: no drafts, each step committed before the next, one request at a time.
A cell also has to have done what its name says: drafts were refused, sequences preempted, steps overlapped.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import logging
import random
import re
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from typing import Any

from deepinfer.entrypoints.llm import LLM
from deepinfer.sampling_params import SamplingParams
from deepinfer.settings import Settings
from tests.support.curves import BelievingCore, believed
from tests.support.engines import assert_idle, facts, make_llm, watched
from tests.support.paths import ROOT

SPECULATION: dict[str, dict[str, Any]] = {
    "off": {"num_draft_tokens": 0},
    **{f"fixed {k}": {"num_draft_tokens": k} for k in range(1, 6)},
    "varlen": {"num_draft_tokens": 5, "use_draft_budget": True},
}
STYLES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "T=1": {"temperature": 1.0},
    "T=0.7 top-p 0.9": {"temperature": 0.7, "top_p": 0.9},
}
BATCH = 32
MAX_MODEL_LEN = 512
SMALL_POOL = 32  # blocks: enough for 32 requests until the first of them needs a second one
PREEMPTION_RATE = 1 / 8  # chance of a preemption before a step


@dataclass(frozen=True)
class Cell:
    """One way to run requests."""

    speculation: str
    style: str
    is_async: bool
    is_batched: bool
    is_preempted: bool

    def __str__(self) -> str:
        parts = (
            self.speculation,
            "async" if self.is_async else "sync",
            f"batch {BATCH}" if self.is_batched else "alone",
            "preempted" if self.is_preempted else "undisturbed",
            self.style,
        )
        return ", ".join(parts)

    @property
    def settings(self) -> Settings:
        return Settings(use_async_scheduling=self.is_async, **SPECULATION[self.speculation])


def every_cell() -> list[Cell]:
    """All of the matrix."""
    flags = (False, True)
    return [
        Cell(speculation, style, is_async, is_batched, is_preempted)
        for speculation, is_async, is_batched, is_preempted, style in itertools.product(
            SPECULATION, flags, flags, flags, STYLES
        )
    ]


def covering_cells() -> list[Cell]:
    """Few cells in which every pair of values of two properties meets."""
    cells = every_cell()
    missing = set().union(*map(_pairs, cells))
    chosen = []
    while missing:
        best = max(cells, key=lambda cell: len(_pairs(cell) & missing))
        chosen.append(best)
        missing -= _pairs(best)
    return chosen


def _pairs(cell: Cell) -> set[Any]:
    return set(itertools.combinations(vars(cell).items(), 2))


@dataclass(frozen=True)
class Work:
    """Requests of one style after the other: prompts, and how many tokens each gets."""

    prompts: tuple[tuple[int, ...], ...]
    max_tokens: tuple[int, ...]

    def params(self, style: str) -> list[SamplingParams]:
        """Seeds of their own; log-probabilities show differences that do not change a token."""
        return [
            SamplingParams(max_tokens=count, ignore_eos=True, logprobs=1, seed=1000 + row, **STYLES[style])
            for row, count in enumerate(self.max_tokens)
        ]


@functools.cache
def bundled_prompts() -> tuple[tuple[int, ...], ...]:
    """Token ids of the prompts beside the bundled model: questions, stories, then prose and code."""
    texts = json.loads((ROOT / "examples" / "prompts.json").read_text())
    with make_llm("v41-tiny", max_num_seqs=1) as llm:
        tokenizer = llm.get_tokenizer()
        questions = [[{"role": "user", "content": text}] for text in texts["questions"]]
        ids = [tokenizer.apply_chat_template(question) for question in questions]
        ids += [tokenizer.encode(text) for text in texts["stories"] + texts["prose_and_code"]]
    return tuple(map(tuple, ids))


def full_work(num_tokens: int = 128) -> Work:
    """All bundled prompts."""
    prompts = bundled_prompts()
    return Work(prompts, (num_tokens,) * len(prompts))


def short_work(num_prompts: int) -> Work:
    """Bundled prompts, most of them lengthened with others so that few outputs fill window and block."""
    prompts = bundled_prompts()
    made, counts = [], []
    for row in range(num_prompts):
        start = row * 11 % len(prompts)
        text = list(prompts[start])
        length = 90 + row * 5 % 6
        for more in itertools.cycle(prompts[start + 1 :] + prompts[: start + 1]):
            if row % 8 == 7 or len(text) >= length:
                break
            text += more[1:]
        made.append(tuple(text[: max(length, len(prompts[start]))]))
        counts.append(40 + row % 3 * 4)
    return Work(tuple(made), tuple(counts))


class DisturbedCore(BelievingCore):
    """Counts steps that are planned while another runs, and preempts sequences at random steps.

    Args:
        rate: chance of a preemption before a plan.
        seed: of the choice.

    Attributes:
        num_overlapped: plans that were made with a step in flight.
        num_preempted: sequences that this object preempted.
    """

    def __init__(self, core: Any, rate: float = 0.0, seed: int = 0) -> None:
        super().__init__(core)
        self._rate = rate
        self._random = random.Random(seed)
        self.num_overlapped = 0
        self.num_preempted = 0

    def schedule(self, *args: Any) -> Any:
        had_step_in_flight = self.num_in_flight > 0
        plan = super().schedule(*args)
        self.num_overlapped += plan is not None and had_step_in_flight
        return plan

    def before_plan(self) -> None:
        if self.plans and self._random.random() < self._rate:
            try:
                self.num_preempted += self.preempt(int(self._random.choice(self.plans[-1].seq_ids)))
            except KeyError:  # it has ended
                pass


@dataclass
class Report:
    """What a cell did.

    Attributes:
        results: one entry per request, all that a caller can see.
        num_verified, num_accepted: drafts.
        num_cut: steps that verified some of the drafts at hand.
        num_preempted: by hand; num_evicted: by the scheduler, for lack of blocks.
    """

    cell: Cell
    results: list[Any] = field(repr=False)
    num_tokens: int
    seconds: float
    tokens_per_step: float
    num_verified: int
    num_accepted: int
    num_cut: int
    num_preempted: int
    num_evicted: int
    num_overlapped: int
    max_batch: int

    def unmet(self) -> list[str]:
        """What the cell's name says and the run did not do."""
        cell, is_drafting = self.cell, self.cell.speculation != "off"
        claims = {
            "drafts are verified": (self.num_verified > 0) == is_drafting,
            "drafts are accepted": (self.num_accepted > 0) == is_drafting,
            "drafts are rejected": (self.num_verified > self.num_accepted) == is_drafting,
            "verify lengths vary": (self.num_cut > 0) == (cell.speculation == "varlen"),
            "steps overlap": (self.num_overlapped > 0) == cell.is_async,
            "sequences are preempted": (self.num_preempted > 0) == cell.is_preempted,
            "the pool is too small": (self.num_evicted > 0) == (cell.is_preempted and cell.is_batched),
            "requests run together": self.max_batch == (BATCH if cell.is_batched else 1),
        }
        return [f"not so: {claim}" for claim, holds in claims.items() if not holds]

    def differences(self, expected: Sequence[Any]) -> list[str]:
        """One line for each request whose result is another one."""
        assert len(self.results) == len(expected)
        return [
            f"request {row}: {_first_difference(got, want)}"
            for row, (got, want) in enumerate(zip(self.results, expected))
            if got != want
        ]

    def line(self) -> str:
        return (
            f"{self.num_tokens:6d} tokens {self.num_tokens / self.seconds:7.1f}/s "
            f"{self.tokens_per_step:5.2f} per step, {self.num_verified:6d} drafts verified "
            f"{self.num_verified - self.num_accepted:6d} rejected, {self.num_preempted:4d} preempted "
            f"{self.num_evicted:4d} evicted, {self.num_overlapped:5d} steps overlapped | {self.cell}"
        )


def _first_difference(got: Any, want: Any) -> str:
    one, other = got[3][0], want[3][0]
    tokens = zip(one[1], other[1])
    place = next((i for i, (a, b) in enumerate(tokens) if a != b), None)
    if place is not None:
        return f"token {place} is {one[1][place]}, not {other[1][place]}"
    if len(one[1]) != len(other[1]):
        return f"{len(one[1])} tokens, not {len(other[1])}"
    place = next((i for i, (a, b) in enumerate(zip(one[3] or (), other[3] or ())) if a != b), None)
    if place is not None:
        return f"log-probability {place} is {one[3][place]!r}, not {other[3][place]!r}"
    return f"{got} instead of {want}"


def run(cell: Cell, work: Work) -> Report:
    """Run a workload in an engine of its own."""
    options: dict[str, Any] = {"max_num_seqs": BATCH, "max_model_len": MAX_MODEL_LEN}
    if cell.is_preempted and cell.is_batched:
        options["num_blocks"] = 1 + SMALL_POOL
    rate = PREEMPTION_RATE if cell.is_preempted else 0.0
    with (
        believed("modest"),
        make_llm("v41-tiny", settings=cell.settings, **options) as llm,
        watched(llm, DisturbedCore, rate) as core,
    ):
        start = time.perf_counter()
        outputs = _generate(llm, cell, work)
        seconds = time.perf_counter() - start
        assert_idle(llm)
        stats = llm.llm_engine.stats
        return Report(
            cell=cell,
            results=facts(outputs),
            num_tokens=sum(work.max_tokens),
            seconds=seconds,
            tokens_per_step=stats.tokens_per_step,
            num_verified=sum(output.metrics.num_verified_tokens for output in outputs),
            num_accepted=sum(output.metrics.num_accepted_tokens for output in outputs),
            num_cut=core.draft_budget_stats().num_cut,
            num_preempted=core.num_preempted,
            num_evicted=sum(len(plan.preempted_ids) for plan in core.plans),
            num_overlapped=core.num_overlapped,
            max_batch=max(plan.num_seqs for plan in core.plans),
        )


def _generate(llm: LLM, cell: Cell, work: Work) -> list[Any]:
    prompts, params = list(map(list, work.prompts)), work.params(cell.style)
    if cell.is_batched:
        return llm.generate(prompts, params, use_tqdm=False)
    return [llm.generate([prompt], [param], use_tqdm=False)[0] for prompt, param in zip(prompts, params)]


@functools.cache
def plain(style: str, is_full: bool) -> list[Any]:
    """How the plain engine answers: one request at a time, or, to save time, the short workload at once."""
    cell = Cell("off", style, is_async=False, is_batched=not is_full, is_preempted=False)
    return run(cell, work_of(cell, is_full)).results


def work_of(cell: Cell, is_full: bool) -> Work:
    """A cell's requests: everything, or as much as shows a difference in seconds."""
    if is_full:
        return full_work()
    return short_work(BATCH + 4 if cell.is_batched else 6)


def problems(cell: Cell, is_full: bool) -> tuple[Report, list[str]]:
    """What a cell did, and what is wrong with it, one line each."""
    return _judged(run_cell(cell, is_full), plain(cell.style, is_full))


def run_cell(cell: Cell, is_full: bool) -> Report:
    """A cell on its own workload."""
    return run(cell, work_of(cell, is_full))


def _judged(report: Report, expected: Sequence[Any]) -> tuple[Report, list[str]]:
    return report, report.unmet() + report.differences(expected[: len(report.results)])


def _reports(cells: Sequence[Cell], is_full: bool, num_jobs: int) -> Iterator[tuple[Report, list[str]]]:
    if num_jobs == 1:
        yield from (problems(cell, is_full) for cell in cells)
        return
    with ProcessPoolExecutor(num_jobs) as pool:
        styles = {cell.style for cell in cells}
        expected = {style: pool.submit(plain, style, is_full) for style in styles}
        slow_first = sorted(cells, key=lambda cell: cell.is_batched)
        for done in as_completed([pool.submit(run_cell, cell, is_full) for cell in slow_first]):
            report = done.result()
            yield _judged(report, expected[report.cell.style].result())


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.engine.matrix", description=__doc__.split("\n")[0])
    parser.add_argument("--all", action="store_true", help="every cell, all bundled prompts, 128 tokens each")
    parser.add_argument("--only", default="", metavar="REGEX", help="only cells in whose name this is found")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="processes (default 1)")
    options = parser.parse_args()
    logging.disable(logging.INFO)
    cells = every_cell() if options.all else covering_cells()
    cells = [cell for cell in cells if re.search(options.only, str(cell))]
    start, num_bad = time.perf_counter(), 0
    for report, wrong in _reports(cells, options.all, options.jobs):
        print("FAILED" if wrong else "same  ", report.line(), flush=True)
        for line in wrong[:5]:
            print("        ", line, flush=True)
        num_bad += bool(wrong)
    minutes = (time.perf_counter() - start) / 60
    print(f"{len(cells)} cells in {minutes:.1f} minutes: {num_bad} failed")
    return 1 if num_bad else 0


if __name__ == "__main__":
    sys.exit(main())
