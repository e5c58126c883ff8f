"""The whole-system equalities for every prompt length.

    python -m tests.engine.every_length [--model v41-tiny|tiny-quant] [--first 1] [--last 520]

Each length runs greedy and sampled, alone with its prompt in one piece; then in every other way, which must
give the same tokens and log-probabilities, bit for bit. Prints one line for each way with the time it took on
the wall and on the processor; ends with status 1 when anything differs. `test_equalities.py` runs a subset.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any

from deepinfer.entrypoints.llm import LLM
from deepinfer.settings import Settings
from tests.engine.equalities import (
    Case,
    Outcome,
    cases_of,
    differences,
    run_alone,
    run_by_decoding,
    run_together,
)
from tests.support.engines import PLAIN_STEPS, assert_idle, make_cold_llm

ONE_STEP = {"max_num_batched_tokens": 1 << 15}
DRAFTING = Settings()

# Name, the engine's settings and limits, how to run cases, and whether the styles take turns to save time.
WAYS: list[tuple[str, Settings, dict[str, Any], Callable[[LLM, Sequence[Case]], Outcome], bool]] = [
    ("32 at once", DRAFTING, ONE_STEP, run_together, False),
    ("chunks of 129", DRAFTING, {"max_num_seqs": 4, "max_num_batched_tokens": 129}, run_together, False),
    ("chunks of 128", DRAFTING, {"max_num_seqs": 4, "max_num_batched_tokens": 128}, run_together, False),
    ("chunks of 7", DRAFTING, {"max_num_seqs": 1, "max_num_batched_tokens": 7}, run_together, True),
    ("token by token", PLAIN_STEPS, {}, run_by_decoding, False),
    ("chunks of 1", PLAIN_STEPS, {"max_num_seqs": 1, "max_num_batched_tokens": 1}, run_together, True),
]


class Clock:
    """Prints as the time since it was made, on the wall and on the processor."""

    def __init__(self) -> None:
        self._start = time.perf_counter(), time.process_time()

    def __str__(self) -> str:
        wall, busy = time.perf_counter() - self._start[0], time.process_time() - self._start[1]
        return f"{wall:7.0f} s, {busy:6.0f} s CPU"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=("v41-tiny", "tiny-quant"), default="v41-tiny")
    parser.add_argument("--first", type=int, default=1)
    parser.add_argument("--last", type=int, default=520)
    arguments = parser.parse_args(argv)
    logging.getLogger("deepinfer").setLevel(logging.WARNING)
    cases = cases_of(range(arguments.first, arguments.last + 1))
    tokens = sum(case.length for case in cases)
    lengths = f"lengths {arguments.first} to {arguments.last}"
    print(f"{arguments.model}, {lengths}: {len(cases)} requests, {tokens} prompt tokens", flush=True)
    with closing(make_cold_llm(arguments.model, settings=PLAIN_STEPS, **ONE_STEP)) as llm:
        clock = Clock()
        expected = dict(zip(cases, run_alone(llm, cases), strict=True))
        print(f"{'alone, whole':16} {clock}", flush=True)
    num_wrong = 0
    for name, settings, limits, run, takes_turns in WAYS:
        mine = [case for place, case in enumerate(cases) if place % 2 == place // 2 % 2 or not takes_turns]
        clock = Clock()
        with closing(make_cold_llm(arguments.model, settings=settings, **limits)) as llm:
            wrong = differences(mine, run(llm, mine), [expected[case] for case in mine])
            assert_idle(llm)
        num_wrong += len(wrong)
        verdict = "equal" if not wrong else f"{len(wrong)} DIFFER"
        print(f"{name:16} {clock}  {len(mine)} requests {verdict}", flush=True)
        for line in wrong[:20]:
            print(f"    {line}", flush=True)
    return 1 if num_wrong else 0


if __name__ == "__main__":
    sys.exit(main())
