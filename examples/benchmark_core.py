"""Time of the C++ core per decode step: schedule, build the inputs, commit; no model runs.

    python examples/benchmark_core.py [--drafts K] [--steps N]

Each line is one number of running sequences with contexts of about 1,000 tokens in 128-token blocks, n-gram
windows of 4 and every sampling array; times are medians over the steps, seen from Python. The last column is
what a sequence-step costs beyond a floor of 20 us.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time

import numpy as np

from deepinfer.native import load_core

VOCAB = 129_280
FLOOR_US = 20.0


def make_engine(num_seqs: int, num_drafts: int, context: int, max_tokens: int):
    """An engine whose `num_seqs` sequences have all been prefilled and have room for `max_tokens` outputs."""
    core = load_core()
    blocks = (context + max_tokens) // 128 + 2
    engine = core.EngineCore(
        core.CoreConfig(
            max_num_seqs=num_seqs,
            max_num_batched_tokens=max(1 << 16, num_seqs * (1 + num_drafts)),
            max_model_len=context + max_tokens + 128,
            vocab_size=VOCAB,
            num_blocks=num_seqs * blocks + 1,
            num_state_slots=num_seqs + 1,
            num_draft_tokens=num_drafts,
            max_ngram=4,
            admission_headroom_tokens=0,
        )
    )
    engine.set_compressed_vocab((np.arange(VOCAB) % 90_000).astype(np.int32), 2)
    rng = np.random.default_rng(0)
    for seed in range(num_seqs):
        params = core.SequenceParams(
            seed=seed, max_tokens=max_tokens, ignore_eos=True, inv_temperature=1.0, top_p=0.9
        )
        engine.add(params, rng.integers(0, VOCAB, context + int(rng.integers(0, 128)), np.int32))
    while engine.num_waiting:
        plan = engine.schedule(core.StepKind.PREFILL)
        engine.commit(plan, np.full(plan.num_samples, 7, np.int32))
    return engine


def measure(num_seqs: int, num_drafts: int, num_steps: int) -> dict[str, float]:
    """Median microseconds of each part over `num_steps` decode steps."""
    engine = make_engine(num_seqs, num_drafts, context=1000, max_tokens=(num_steps + 2) * (1 + num_drafts))
    rng = np.random.default_rng(1)
    times: dict[str, list[float]] = {"schedule": [], "build": [], "commit": [], "total": []}
    drafts = np.full((num_seqs, num_drafts), 7, np.int32) if num_drafts else None
    buffer = np.zeros(1 << 28, np.uint8)
    for _ in range(num_steps):
        start = time.perf_counter()
        plan = engine.schedule()
        scheduled = time.perf_counter()
        engine.layout(plan)
        engine.fill(plan, buffer)
        built = time.perf_counter()
        tokens = rng.integers(0, VOCAB, plan.num_samples, np.int32)
        tokens[rng.random(plan.num_samples) < 0.7] = 7  # accepted drafts, when there are any
        before = time.perf_counter()
        engine.commit(plan, tokens, drafts=drafts)
        done = time.perf_counter()
        assert plan.num_seqs == num_seqs
        for name, seconds in (
            ("schedule", scheduled - start),
            ("build", built - scheduled),
            ("commit", done - before),
            ("total", built - start + done - before),
        ):
            times[name].append(seconds * 1e6)
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--drafts", type=int, default=0, help="drafts per sequence and step")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--sequences", type=int, nargs="*", default=[1, 256, 1024, 4096])
    args = parser.parse_args()
    print(f"{platform.machine()}, Python {platform.python_version()}, {args.drafts} drafts")
    names = ("schedule", "build", "commit", "total us")
    print(f"{'running':>8} {' '.join(f'{name:>9}' for name in names)}   us/sequence beyond {FLOOR_US:.0f} us")
    for num_seqs in args.sequences:
        parts = measure(num_seqs, args.drafts, args.steps)
        per_sequence = max(0.0, parts["total"] - FLOOR_US) / num_seqs
        row = [f"{parts[name]:9.1f}" for name in ("schedule", "build", "commit", "total")]
        print(f"{num_seqs:8d} {' '.join(row)} {per_sequence:25.3f}")


if __name__ == "__main__":
    main()
