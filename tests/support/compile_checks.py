"""Compile programs of the release model for the CUDA architectures, and read what the binaries need.

Programs with the same options are compiled in batches, each in a namespace of one translation unit that
includes what any of them does: headers take nvcc more time than most programs. What a program needs is
remembered by its source files, so that a second run takes seconds, and by the traced program, so that one
after a change of files that many programs import does so too.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tests.support.build_cache import fingerprint, remembered, write_whole
from tests.support.shared_passes import SharedPasses
from tilelang_ops.common.kernels import Program, compiler_target

Job = tuple[Program, str]  # and its target

SHARED_MEMORY = 232448  # bytes of one block, on both architectures
REGISTERS = 65536  # of a multiprocessor
BATCH = 32  # programs in one translation unit
# The architecture's own matrix instructions, as SASS spells them; HMMA is the slower path on both.
MATRIX_INSTRUCTIONS = {"sm_90a": r"\b(?:HGMMA|QGMMA|IGMMA)\b", "sm_100a": r"\bUTC(?:H|Q|I|O|MX\w*)MMA\b"}


@dataclass(frozen=True)
class Report:
    """What the binary of one program needs.

    Attributes:
        error: first line of what went wrong; the other numbers are 0 then.
        registers: of a thread.
        spilled_bytes, stack_bytes: local memory of a thread.
        shared_bytes: static and dynamic shared memory of a block.
        threads: of a block.
        matrix_instructions: the architecture's own; counted for programs that must have them.
    """

    error: str = ""
    registers: int = 0
    spilled_bytes: int = 0
    stack_bytes: int = 0
    shared_bytes: int = 0
    threads: int = 0
    matrix_instructions: int = 0


@dataclass(frozen=True)
class _Lowered:
    """CUDA source of one program and what only TileLang knows about it."""

    preamble: str  # includes
    body: str
    flags: tuple[str, ...]
    dynamic_shared: int
    threads: int
    wants_matrix: bool

    @property
    def kernels(self) -> list[str]:
        return re.findall(r'extern "C" __global__ void (?:__launch_bounds__\([^)]*\) )?(\w+)\(', self.body)


@dataclass(frozen=True)
class _Todo:
    """A program to compile, and the files that remember its report."""

    program: Program
    lowered: _Lowered
    paths: tuple[Path, ...]


def check(report: Report, *, uses_tensor_cores: bool) -> None:
    """Assert that a program compiles, spills nothing and stays within the hardware's limits."""
    assert not report.error, report.error
    assert report.spilled_bytes == 0, report
    assert report.shared_bytes <= SHARED_MEMORY, report
    assert report.registers * report.threads <= REGISTERS, report
    assert report.matrix_instructions > 0 or not uses_tensor_cores, (
        f"no matrix instruction of the architecture: {report}"
    )


def covering(programs: Iterable[Program], *, both_ends: bool = True) -> list[Program]:
    """One program of every factory, and two (the first and the last) of those with matrix products.

    `python -m tests.support.compile_checks` compiles all that a model launches.

    Args:
        programs: what to choose from, those of a factory together.
        both_ends: False takes one program of those too.
    """
    by_factory: dict[str, list[Program]] = {}
    for program in programs:
        by_factory.setdefault(program.factory.name, []).append(program)
    chosen: list[Program] = []
    for own in by_factory.values():
        has_two = both_ends and len(own) > 1 and own[0].factory.uses_tensor_cores
        chosen += [own[0], *(own[-1:] if has_two else [])]
    return chosen


def compile_all(jobs: Iterable[Job]) -> dict[Job, Report]:
    """Reports of programs for targets, from the cache or compiled now.

    Raises:
        FileNotFoundError: nvcc is not here.
    """
    tools = (nvcc(), nvdisasm())
    targets: dict[Program, list[str]] = {}
    for program, target in jobs:
        targets.setdefault(program, []).append(target)
    reports: dict[Job, Report] = {}
    open_batches: dict[tuple[Any, ...], list[_Todo]] = {}
    running: list[Future[dict[Job, Report]]] = []
    with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // _workers())) as pool:
        for program in targets:
            passes = SharedPasses()
            for target in targets[program]:
                found = _find(program, target, passes)
                if isinstance(found, Report):
                    reports[program, target] = found
                    continue
                batch = open_batches.setdefault((target, found.lowered.flags), [])
                batch.append(found)
                if len(batch) == BATCH:
                    del open_batches[target, found.lowered.flags]
                    running.append(pool.submit(_compile_and_keep, batch, target, tools))
        running += [
            pool.submit(_compile_and_keep, batch, target, tools)
            for (target, _), batch in open_batches.items()
        ]
        for job in running:
            reports.update(job.result())
    return reports


def _find(program: Program, target: str, passes: SharedPasses) -> Report | _Todo:
    """What is known of a program, else its source; an error of TileLang's is a report too."""
    by_files = remembered("compiled", _versions(), program.file_name(target))
    known = _recall(by_files)
    if known is not None:
        return known
    try:
        traced = program.trace(target)
        by_program = remembered("compiled", _versions(), target, fingerprint(program, traced))
        known = _recall(by_program)
        if known is not None:
            write_whole(by_files, by_program.read_text())
            return known
        with passes.applied():
            return _Todo(program, _lower(program, traced, target), (by_files, by_program))
    except Exception as error:  # TileLang raises whatever its passes raise
        return Report(error=f"{type(error).__name__}: {_last_line(str(error))}")


def _compile_and_keep(batch: list[_Todo], target: str, tools: tuple[str, str]) -> dict[Job, Report]:
    """Reports of a batch; each is remembered as soon as it is there, so that an interrupted run can go on."""
    reports = _compile([todo.lowered for todo in batch], target, tools)
    for todo, report in zip(batch, reports, strict=True):
        if not report.error:
            for path in todo.paths:
                write_whole(path, json.dumps(asdict(report)))
    return {(todo.program, target): report for todo, report in zip(batch, reports, strict=True)}


def _workers() -> int:
    return int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))


# -- tools


@cache
def nvcc() -> str:
    """Path of nvcc: on PATH, or from the wheel nvidia-cuda-nvcc.

    Raises:
        FileNotFoundError: neither is here.
    """
    from tilelang.env import CUDA_HOME

    for path in (shutil.which("nvcc"), os.path.join(CUDA_HOME or "", "bin", "nvcc")):
        if path and os.path.exists(path):
            return path
    raise FileNotFoundError("nvcc is neither on PATH nor installed by pip: pip install -e .[kernels]")


@cache
def nvdisasm() -> str:
    """Path of nvdisasm: beside nvcc, on PATH, or from the wheels nvidia-cuda-nvdisasm or triton.

    Raises:
        FileNotFoundError: it is in none of them.
    """
    import importlib.util

    candidates = [shutil.which("nvdisasm"), str(Path(nvcc()).with_name("nvdisasm"))]
    for package, place in (("nvidia", "cu13/bin"), ("triton", "backends/nvidia/bin")):
        spec = importlib.util.find_spec(package)
        for root in (spec.submodule_search_locations or ()) if spec else ():
            candidates.append(os.path.join(root, place, "nvdisasm"))
    for path in candidates:
        if path and os.path.exists(path):
            return path
    raise FileNotFoundError("nvdisasm is nowhere: pip install -e .[kernels]")


@cache
def _versions() -> str:
    """What besides the programs decides a report: compilers, and the text of this file."""
    import tilelang

    compiler = subprocess.run([nvcc(), "--version"], capture_output=True, text=True, check=True).stdout
    return f"{tilelang.__version__}|{compiler}|{Path(__file__).read_text()}"


def _recall(path: Path) -> Report | None:
    return Report(**json.loads(path.read_text())) if path.exists() else None


# -- TileLang


def _lower(program: Program, traced: Any, target: str) -> _Lowered:
    import tilelang
    from tilelang.transform.pass_config import normalize_pass_configs
    from tvm.target import Target

    configs = normalize_pass_configs(dict(program.factory.pass_configs))
    device = Target(compiler_target(target))
    with tilelang.transform.PassContext(opt_level=3, config=configs), device:
        artifact = tilelang.lower(traced, target=device)
    source = str(artifact.kernel_source)
    check_operands(source)
    start = source.index('extern "C" __global__')
    shared, threads = _launch_sizes(artifact.device_mod)
    return _Lowered(
        preamble=source[:start],
        body=source[start:],
        flags=_flags(configs),
        dynamic_shared=shared,
        threads=threads,
        wants_matrix=program.factory.uses_tensor_cores,
    )


def check_operands(source: str) -> None:
    """Assert that products with their first operand in registers read no array past its end.

    TileLang counts the elements of a view, and adds them to a pointer to what was declared: if that has
    larger ones, an instruction reads what lies behind, and no compiler says so.
    """
    sizes = {name: (_BYTES[kind], int(count)) for kind, name, count in _ARRAY.findall(source)}
    steps = {name: int(count) for name, count in _LOOP.findall(source)}
    for name, step, each in _OPERAND.findall(source):
        size, count = sizes[name]
        end = (steps[step] - 1) * int(each) + _OPERAND_BYTES // size
        assert end <= count, f"an instruction reads {name}[.. {end - 1}], which has {count} elements"


_BYTES = {"uint": 4, "int": 4, "float": 4, "bfloat16_t": 2, "half_t": 2, "fp8_e4_t": 1, "fp8_e5_t": 1}
_ARRAY = re.compile(rf"^\s*({'|'.join(_BYTES)}) (\w+)\[(\d+)\];", re.MULTILINE)
_LOOP = re.compile(r"for \(int (\w+) = 0; \1 < (\d+); \+\+\1\)")
_OPERAND = re.compile(r"wgmma_rs<[^;]*?>\(reinterpret_cast<const uint32_t\*>\((\w+) \+ \((\w+) \* (\d+)\)\)")
_OPERAND_BYTES = 16  # of a thread


def _launch_sizes(module: Any) -> tuple[int, int]:
    """Largest dynamic shared memory and number of threads among a module's kernels."""
    shared, threads = 0, 0
    for function in module.functions.values():
        attributes = function.attrs
        if "dyn_shared_memory_buf" in attributes:
            shared = max(shared, int(attributes["dyn_shared_memory_buf"]))
        if "thread_extent" in attributes:
            extents = {str(axis): int(n) for axis, n in attributes["thread_extent"].items() if _is_int(n)}
            count = 1
            for axis in "xyz":
                count *= extents.get(f"threadIdx.{axis}", 1)
            threads = max(threads, count)
    return shared, threads


def _is_int(value: Any) -> bool:
    return isinstance(value, int) or type(value).__name__ == "IntImm"


def _flags(configs: Mapping[str, Any]) -> tuple[str, ...]:
    """What TileLang adds to nvcc's command for a program's options."""
    extra = configs.get("tl.device_compile_flags") or []
    flags = [
        part for flag in ([extra] if isinstance(extra, str) else extra) for part in shlex.split(str(flag))
    ]
    if configs.get("tl.enable_fast_math"):
        flags.append("--use_fast_math")
    if configs.get("tl.ptxas_register_usage_level") is not None:
        flags.append(f"-Xptxas=--register-usage-level={int(configs['tl.ptxas_register_usage_level'])}")
    return tuple(flags)


# -- nvcc


def _compile(batch: list[_Lowered], target: str, tools: tuple[str, str]) -> list[Report]:
    """Compile programs with the same options; halves of them where they fail together."""
    compiler, disassembler = tools
    text = _includes(batch) + "".join(_namespace(k, lowered) for k, lowered in enumerate(batch))
    with tempfile.TemporaryDirectory() as directory:
        source, binary = Path(directory, "batch.cu"), Path(directory, "batch.cubin")
        source.write_text(text)
        command = [compiler, *_options(target), *batch[0].flags, "-o", str(binary), str(source)]
        result = subprocess.run(command, capture_output=True, text=True)
        if result.returncode:
            if len(batch) > 1:
                half = len(batch) // 2
                return _compile(batch[:half], target, tools) + _compile(batch[half:], target, tools)
            return [Report(error=_last_line(result.stderr, "error"))]
        usage = _read_usage(result.stderr)
        code = {}
        if any(lowered.wants_matrix for lowered in batch):
            listing = subprocess.run(
                [disassembler, "-c", str(binary)], capture_output=True, text=True, check=True
            ).stdout
            code = _by_kernel(listing)
    pattern = re.compile(MATRIX_INSTRUCTIONS[target])
    reports = []
    for k, lowered in enumerate(batch):
        kernels = [f"p{k}_{name}" for name in lowered.kernels]
        own = [usage[name] for name in kernels]
        reports.append(
            Report(
                registers=max(u["registers"] for u in own),
                spilled_bytes=sum(u["spilled"] for u in own),
                stack_bytes=max(u["stack"] for u in own),
                shared_bytes=max(u["shared"] for u in own) + lowered.dynamic_shared,
                threads=lowered.threads,
                matrix_instructions=sum(len(pattern.findall(code.get(name, ""))) for name in kernels),
            )
        )
    return reports


def _options(target: str) -> list[str]:
    from tilelang.contrib.cc import get_cplus_compiler
    from tilelang.env import CUTLASS_INCLUDE_DIR, TILELANG_TEMPLATE_PATH

    includes = [f"-I{TILELANG_TEMPLATE_PATH}", f"-I{CUTLASS_INCLUDE_DIR}"]
    own = ["--cubin", "-O3", "-std=c++20", f"-arch={target}", f"-ccbin={get_cplus_compiler()}"]
    return [*own, *includes, "-w", "-Xptxas=-v"]


def _includes(batch: list[_Lowered]) -> str:
    """The text before the first program, and what others include besides."""
    first, *others = (lowered.preamble for lowered in batch)
    known = set(first.splitlines())
    lines = dict.fromkeys(line for other in others for line in other.splitlines())
    return first + "".join(f"{line}\n" for line in lines if line.startswith("#include") and line not in known)


def _namespace(k: int, lowered: _Lowered) -> str:
    """A program's kernels under names of their own: `extern "C"` ones would meet in one file."""
    body = lowered.body
    for name in lowered.kernels:
        body = re.sub(rf"\b{name}\b", f"p{k}_{name}", body)
    return f"namespace program_{k} {{\n{body}\n}}\n"


def _read_usage(log: str) -> dict[str, dict[str, int]]:
    """What ptxas -v says about each kernel."""
    usage: dict[str, dict[str, int]] = {}
    for part in re.split(r"Compiling entry function '", log)[1:]:
        numbers = {
            "registers": r"Used (\d+) registers",
            "stack": r"(\d+) bytes stack frame",
            "shared": r"(\d+) bytes smem",
        }
        found = {name: re.search(pattern, part) for name, pattern in numbers.items()}
        usage[part.split("'", 1)[0]] = {
            **{name: int(match[1]) if match else 0 for name, match in found.items()},
            "spilled": sum(int(n) for n in re.findall(r"(\d+) bytes spill", part)),
        }
    return usage


def _by_kernel(listing: str) -> dict[str, str]:
    """Instructions of each kernel in nvdisasm's output."""
    parts = re.split(r"^\s*\.section\s+\.text\.(\w+)", listing, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def _last_line(text: str, word: str = "") -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    wanted = [line for line in lines if word in line] or lines or ["no message"]
    return (wanted[0] if word else wanted[-1])[:400]


def main() -> None:
    """Compile every program of the release model for both architectures and lower those for Ascend.

    Prints what fails or spills.
    """
    from tests.support import ascend_checks
    from tilelang_ops.build import programs
    from tilelang_ops.common.kernels import ASCEND_TARGET, CUDA_TARGETS
    from tilelang_ops.common.sizes import RELEASE

    reports = compile_all(
        (program, target) for target in CUDA_TARGETS for program in programs(target, RELEASE)
    )
    for (program, target), report in reports.items():
        if report.error or report.spilled_bytes:
            print(target, program, report.error or f"spills {report.spilled_bytes} bytes")
    ported = list(programs(ASCEND_TARGET, RELEASE))
    for program in ported:
        try:
            ascend_checks.check(ascend_checks.lower(program), uses_cube=program.factory.uses_tensor_cores)
        except Exception as error:  # TileLang raises whatever its passes raise
            print(ASCEND_TARGET, program, _last_line(str(error)))
    for target in CUDA_TARGETS:
        print(f"{target}: {sum(t == target for _, t in reports)} programs")
    print(f"{ASCEND_TARGET}: {len(ported)} programs")


if __name__ == "__main__":
    main()
