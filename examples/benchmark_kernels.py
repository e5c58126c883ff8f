"""Time the kernels on this GPU at serving sizes, beside the roofline and the same work in torch.

    python -m examples.benchmark_kernels --families moe kv_cache

Prints a Markdown table (`doc/kernels.md` has one) or, with --json, a JSON line a case, as cases end. What the
kernel and torch compute is checked before it is timed. Launches are captured in a CUDA graph over several
copies of the arguments, larger together than the L2 cache, so that every byte comes from memory; the time is
the median of replays, for one launch. Work in torch that waits for the device cannot be captured: its calls
are timed as they are, and marked with *.

    roofline = max(bytes / bandwidth, flops / rate), for an H200: 4.2 TB/s, 780 TFLOP/s in bfloat16, 1416 FP8

Cases run in a fresh process, and after one that fails, other than in its check, the rest in another. A run
that `--seconds` ends early says how to go on. Kernels are taken from `DEEPINFER_KERNEL_LIBRARY` where it has
them.
"""

from __future__ import annotations

import argparse
import importlib
import json
import pkgutil
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from deepinfer.settings import Settings
from examples import kernel_cases
from examples.kernel_cases.case import Case
from tilelang_ops.common.kernels import use_library

BANDWIDTH = 4.2e12  # bytes/s, a copy
L2_BYTES = 200 << 20  # what the copies of the arguments take together, four times the cache
MAX_COPIES = 48
REPLAYS = range(3, 18)  # as many as fit in the budget
BUDGET_MS = 50.0
FIRST = ("gemm", "attention", "indexer", "sampling")
MODULES = [m.name for m in pkgutil.iter_modules(kernel_cases.__path__) if m.name != "case"]
FAMILIES = [*FIRST, *(name for name in MODULES if name not in FIRST)]
HEADER = "| op | size | MB | GFLOP | roofline us | measured us | share | torch us |"


def main() -> None:
    """Run the cases named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=FAMILIES)
    parser.add_argument("--only", default="", help="cases whose op or size contains this")
    parser.add_argument(
        "--skip", type=int, default=0, help="leave out this many cases, those of an earlier run"
    )
    parser.add_argument("--seconds", type=float, default=1e9, help="start no case later than this")
    parser.add_argument("--json", action="store_true", help="JSON lines instead of a table")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    cases = [
        case
        for family in args.families
        for case in importlib.import_module(f"examples.kernel_cases.{family}").cases()
        if args.only in case.op or args.only in case.size
    ]
    if args.worker:
        _work(cases[args.skip :])
    else:
        sys.exit(_oversee(args, cases))


def _work(cases: list[Case]) -> None:
    """Print a JSON line a case; end after an error that may have left the device unusable."""
    library = Settings.from_env().kernel_library
    use_library(None if library is None else Path(library))
    for case in cases:
        result = measure(case)
        print(json.dumps(result), flush=True)
        if result["error"] and "AssertionError" not in result["error"]:
            break
        torch.cuda.empty_cache()


def _oversee(args: argparse.Namespace, cases: list[Case]) -> int:
    """Run the cases in worker processes and print what comes; how many failed."""
    start, done, failures = time.monotonic(), args.skip, 0
    if not args.json:
        print(HEADER, "|---" * HEADER.count(" | ") + "|---|", sep="\n", flush=True)
    while done < len(cases) and time.monotonic() < start + args.seconds:
        command = [sys.executable, "-m", "examples.benchmark_kernels", "--worker", "--skip", str(done)]
        command += ["--only", args.only, "--families", *args.families]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as worker:
            error = None
            for line in worker.stdout or ():
                result = json.loads(line)
                error = result["error"]
                if args.json or result["us"] is not None:
                    print(line.rstrip() if args.json else _row(result), flush=True)
                failures += _report(cases[done], error)
                done += 1
                if time.monotonic() > start + args.seconds:
                    worker.kill()
                    break
            else:
                if done < len(cases) and not error:
                    failures += _report(cases[done], "its process ended")
                    done += 1
    spent = time.monotonic() - start
    if done < len(cases):
        print(f"{done} of {len(cases)} cases; go on with --skip {done}", file=sys.stderr, flush=True)
    print(f"{done - args.skip} cases in {spent:.0f} s, {failures} failed", file=sys.stderr, flush=True)
    return failures


def _report(case: Case, error: str | None) -> bool:
    if error:
        print(f"{case.op}, {case.size}: {error}", file=sys.stderr, flush=True)
    return bool(error)


def measure(case: Case) -> dict[str, Any]:
    """Check and time one case; times in microseconds, None where `error` says what went wrong."""
    start = time.monotonic()
    copies = min(MAX_COPIES, max(2, -(-L2_BYTES // max(case.bytes, 1))))
    roofline = 1e6 * max(case.bytes / BANDWIDTH, case.flops / case.rate)
    result = {
        "op": case.op,
        "size": case.size,
        "bytes": case.bytes,
        "flops": case.flops,
        "roofline_us": roofline,
    }
    result |= {"us": None, "share": None, "torch_us": None, "torch_waits": None, "error": None}
    try:
        case.try_run("cuda")
        arguments = [case.arguments(seed, "cuda") for seed in range(copies)]
        result["us"] = time_launches(case.run, arguments, True)
        result["share"] = roofline / result["us"]
        case.try_torch("cuda")
        result["torch_waits"] = _waits(case.torch, arguments[0])
        result["torch_us"] = time_launches(case.torch, arguments, not result["torch_waits"])
    except Exception as error:  # one case must not cost the others
        side = "torch" if result["us"] else "kernel"
        result["error"] = f"{side}: {type(error).__name__}: {error}"
    return result | {"seconds": time.monotonic() - start}


def _waits(run: Callable[..., Any], args: tuple[Any, ...]) -> bool:
    """Whether `run` waits for the device."""
    with warnings.catch_warnings(action="ignore"):  # that this mode may be incomplete
        torch.cuda.set_sync_debug_mode("error")
    try:
        run(*args)
    except RuntimeError:
        return True
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return False


def time_launches(run: Callable[..., Any], arguments: list[tuple[Any, ...]], captures: bool) -> float:
    """Median microseconds of one call; a turn calls `run` once for each arguments, in a graph or as it is."""

    def calls() -> None:
        for args in arguments:
            run(*args)

    turn = calls
    if captures:
        stream = torch.cuda.Stream()
        torch.cuda.synchronize()  # the arguments are ready: the stream does not wait for those that made them
        with torch.cuda.stream(stream):
            for _ in range(2):
                run(*arguments[0])
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            calls()
        turn = graph.replay
    _time(turn)
    first = _time(turn)
    num_turns = min(max(int(BUDGET_MS / first), REPLAYS.start), REPLAYS.stop)
    return statistics.median(_time(turn) for _ in range(num_turns)) * 1e3 / len(arguments)


def _time(turn: Callable[[], None]) -> float:
    """Milliseconds on the device."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    turn()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def _row(result: dict[str, Any]) -> str:
    torch_us = "" if result["torch_us"] is None else f"{result['torch_us']:.1f}{'*' * result['torch_waits']}"
    return (
        f"| {result['op']} | {result['size']} | {result['bytes'] / 1e6:.1f} | {result['flops'] / 1e9:.1f} "
        f"| {result['roofline_us']:.1f} | {result['us']:.1f} | {result['share']:.0%} | {torch_us} |"
    )


if __name__ == "__main__":
    main()
