"""Compile the kernels of a model ahead of time, on a machine that needs no GPU.

    python -m tilelang_ops.build --target sm_90a --out kernels       one shared object a kernel
    python -m tilelang_ops.build --target sm_90a                     fills TileLang's own cache

A directory made with --out serves as `DEEPINFER_KERNEL_LIBRARY`: kernels in it load without a compiler.
Needs TileLang and the target's device compiler (nvcc for CUDA).
"""

from __future__ import annotations

import argparse
import importlib
import json
import pkgutil
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
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


def build(program: Program, target: str, out: Path | None) -> bool:
    """Compile a program into TileLang's cache, and export it to `out`; False where it is there already."""
    if out is not None and (out / program.file_name(target)).exists():
        return False
    compiled = compile_program(program, target)
    if out is not None:
        partial = out / f"{program.file_name(target)}.partial"
        compiled.export_library(str(partial))
        partial.rename(out / program.file_name(target))
    return True


def main() -> None:
    """Parse the command line and build."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", required=True, choices=CUDA_TARGETS)
    parser.add_argument(
        "--out", type=Path, help="directory for shared objects; without it only the cache is filled"
    )
    parser.add_argument("--config", type=Path, help="config.json of the model; default: DeepSeek-V4.1-Flash")
    parser.add_argument("--only", default="", help="kernels whose name contains this text")
    parser.add_argument("--jobs", type=int, default=4, help="kernels compiled at once")
    args = parser.parse_args()
    model = RELEASE if args.config is None else ModelSizes.from_config(json.loads(args.config.read_text()))
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
    todo = [program for program in programs(args.target, model) if args.only in program.factory.name]
    with ThreadPoolExecutor(args.jobs) as pool:
        jobs = [pool.submit(build, program, args.target, args.out) for program in todo]
    failures = [f"{program}: {job.exception()}" for program, job in zip(todo, jobs) if job.exception()]
    built = sum(job.exception() is None and job.result() for job in jobs)
    kept = len(todo) - built - len(failures)
    print(f"{args.target}: {built} kernels built, {kept} kept, {len(failures)} failed")
    sys.exit("\n".join(failures) or 0)


if __name__ == "__main__":
    main()
