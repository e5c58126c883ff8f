"""Compile the kernels of a model ahead of time, on a machine that needs no GPU.

    python -m tilelang_ops.build --target sm_90a --out kernels       one shared object a kernel
    python -m tilelang_ops.build --target sm_90a                     fills TileLang's own cache

A directory made with --out serves as `DEEPINFER_KERNEL_LIBRARY`: kernels in it load without a compiler.
Needs TileLang and the target's device compiler (nvcc for CUDA).
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import multiprocessing
import os
import pkgutil
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from pathlib import Path

import tilelang_ops
from tilelang_ops.common.kernels import CUDA_TARGETS, KernelFactory, Program, compile_program
from tilelang_ops.common.sizes import RELEASE, ModelSizes

BACKEND_MODULES = ("cuda", "ascend")


def factories(target: str) -> Iterator[KernelFactory]:
    """Every factory that is written for a target."""
    for module in pkgutil.walk_packages(tilelang_ops.__path__, "tilelang_ops."):
        if module.name.rpartition(".")[2] in BACKEND_MODULES:
            for value in vars(importlib.import_module(module.name)).values():
                is_own = isinstance(value, KernelFactory) and value.make.__module__ == module.name
                if is_own and target in value.targets:
                    yield value


def programs(target: str, model: ModelSizes) -> Iterator[Program]:
    """Every program that a model of these sizes launches on a target."""
    for factory in factories(target):
        for sizes in factory.builds(model):
            yield factory(**sizes)


def build(program: Program, target: str, out: Path | None) -> None:
    """Compile a program into TileLang's cache, and export it to `out`."""
    compiled = compile_program(program, target)
    if out is not None:
        partial = out / f"{program.file_name(target)}.partial"
        compiled.export_library(str(partial))
        partial.rename(out / program.file_name(target))


def build_all(todo: list[int], target: str, model: ModelSizes, out: Path | None, jobs: int) -> dict[int, str]:
    """Build programs, by their place in `programs`; the messages of those that fail.

    Lowering holds Python's lock, so jobs are processes; one job is this process. Programs of much source
    take longest, and are begun first.
    """
    listed = _listed(target, model)
    todo = sorted(todo, key=lambda i: -sum(path.stat().st_size for path in listed[i].factory.source_files))
    if jobs == 1 or len(todo) < 2:
        return {i: message for i in todo if (message := _try_to_build(i, target, model, out))}
    with ProcessPoolExecutor(min(jobs, len(todo)), multiprocessing.get_context("spawn")) as pool:
        running = {i: pool.submit(_try_to_build, i, target, model, out) for i in todo}
    return {i: message for i, job in running.items() if (message := str(job.exception() or job.result()))}


def _try_to_build(place: int, target: str, model: ModelSizes, out: Path | None) -> str:
    """An empty text, or what went wrong: exceptions of compilers do not all travel between processes."""
    try:
        build(_listed(target, model)[place], target, out)
    except Exception as error:  # TileLang raises whatever its passes raise
        return f"{type(error).__name__}: {error}"
    return ""


@cache
def _listed(target: str, model: ModelSizes) -> list[Program]:
    return list(programs(target, model))


def main() -> None:
    """Parse the command line and build."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", required=True, choices=CUDA_TARGETS)
    parser.add_argument(
        "--out", type=Path, help="directory for shared objects; without it only the cache is filled"
    )
    parser.add_argument("--config", type=Path, help="config.json of the model; default: DeepSeek-V4.1-Flash")
    parser.add_argument(
        "--resident-experts",
        type=int,
        nargs=2,
        default=(),
        metavar=("MODEL", "DRAFTER"),
        help="experts of a layer that one rank of an expert-parallel group holds: 7 2 for 64 ranks",
    )
    parser.add_argument("--only", default="", help="kernels whose name contains this text")
    parser.add_argument("--jobs", type=int, help="processes that compile; default: one a core")
    args = parser.parse_args()
    model = RELEASE if args.config is None else ModelSizes.from_config(json.loads(args.config.read_text()))
    model = dataclasses.replace(model, resident_experts=tuple(args.resident_experts))
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
    listed = _listed(args.target, model)
    wanted = [i for i, program in enumerate(listed) if args.only in program.factory.name]
    there = [] if args.out is None else [path.name for path in args.out.iterdir()]
    todo = [i for i in wanted if listed[i].file_name(args.target) not in there]
    jobs = args.jobs or len(os.sched_getaffinity(0))
    failures = build_all(todo, args.target, model, args.out, jobs)
    built, kept = len(todo) - len(failures), len(wanted) - len(todo)
    print(f"{args.target}: {built} kernels built, {kept} kept, {len(failures)} failed")
    sys.exit("\n".join(f"{listed[i]}: {message}" for i, message in failures.items()) or 0)


if __name__ == "__main__":
    main()
