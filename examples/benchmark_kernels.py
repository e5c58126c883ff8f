"""Time the kernels on this GPU at serving sizes, beside the roofline and the same work in torch.

    python -m examples.benchmark_kernels --families moe kv_cache

Prints a Markdown table (`doc/kernels.md` has one) or, with --json, a JSON line a case. Each family runs in a
process of its own. A case's output is checked before it is timed. Launches are captured in a CUDA graph over
several copies of the arguments, larger together than the L2 cache, so that every byte comes from memory;
the time is the median of replays, for one launch.

    roofline = max(bytes / bandwidth, flops / rate), for an H200: 4.2 TB/s, 780 TFLOP/s in bfloat16
"""

from __future__ import annotations

import argparse
import importlib
import json
import pkgutil
import statistics
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import torch

from examples import kernel_cases
from examples.kernel_cases.case import Case

BANDWIDTH = 4.2e12  # bytes/s, a copy
RATE = 780e12  # operations/s, bfloat16 products
L2_BYTES = 200 << 20  # what the copies of the arguments take together, four times the cache
MAX_COPIES = 48
REPLAYS = 20
HEADER = "| op | size | MB | GFLOP | roofline us | measured us | share | torch us |"


def main() -> None:
    """Run the families named on the command line."""
    families = [m.name for m in pkgutil.iter_modules(kernel_cases.__path__) if m.name != "case"]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--families", nargs="+", choices=families, default=families)
    parser.add_argument("--only", default="", help="cases whose op or size contains this")
    parser.add_argument("--json", action="store_true", help="JSON lines instead of a table")
    parser.add_argument("--in-process", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if not args.json:
        print(HEADER)
        print("|---|---|---|---|---|---|---|---|")
    sys.stdout.flush()
    failed = False
    for family in args.families:
        if args.in_process:
            failed |= _run_family(family, args.only)
        else:
            command = [sys.executable, "-m", "examples.benchmark_kernels", "--in-process", "--json"]
            command += ["--families", family, "--only", args.only]
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
                for line in process.stdout:
                    print(line.rstrip() if args.json else _row(json.loads(line)), flush=True)
            failed |= process.returncode != 0
    sys.exit(failed)


def _run_family(family: str, only: str) -> bool:
    failed = False
    for case in importlib.import_module(f"examples.kernel_cases.{family}").cases():
        if only not in case.op and only not in case.size:
            continue
        try:
            print(json.dumps(measure(case)), flush=True)
        except Exception as error:  # one case must not cost the others
            failed = True
            print(f"{case.op}, {case.size}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
    return failed


def measure(case: Case) -> dict[str, Any]:
    """Check and time one case; times in microseconds."""
    arguments = [case.make(0)]
    case.check(case.run(*arguments[0]), arguments[0])
    copies = min(MAX_COPIES, max(2, -(-L2_BYTES // max(case.bytes, 1))))
    arguments = [case.make(seed) for seed in range(copies)]
    roofline = 1e6 * max(case.bytes / BANDWIDTH, case.flops / RATE)
    time = time_launches(case.run, arguments)
    return {
        "op": case.op,
        "size": case.size,
        "bytes": case.bytes,
        "flops": case.flops,
        "roofline_us": roofline,
        "us": time,
        "share": roofline / time,
        "torch_us": None if case.torch is None else time_launches(case.torch, arguments),
    }


def time_launches(run: Callable[..., Any], arguments: list[tuple[Any, ...]]) -> float:
    """Median microseconds of one call, from replays of a graph that calls `run` once for each arguments."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(2):
            run(*arguments[0])
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for args in arguments:
            run(*args)
    times = []
    for _ in range(REPLAYS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / len(arguments))
    return statistics.median(times[3:])


def _row(result: dict[str, Any]) -> str:
    torch_us = "" if result["torch_us"] is None else f"{result['torch_us']:.1f}"
    return (
        f"| {result['op']} | {result['size']} | {result['bytes'] / 1e6:.1f} | {result['flops'] / 1e9:.1f} "
        f"| {result['roofline_us']:.1f} | {result['us']:.1f} | {result['share']:.0%} | {torch_us} |"
    )


if __name__ == "__main__":
    main()
