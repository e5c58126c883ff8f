"""The checks themselves: each limit and each fault is noticed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import tilelang.language as T

from tests.support import build_cache, compile_checks
from tests.support.compile_checks import Report, check, check_operands, compile_all
from tests.support.shared_passes import SharedPasses
from tilelang_ops.common.kernels import KernelFactory, Program
from tilelang_ops.common.sizes import RELEASE
from tilelang_ops.engram.hash_ngrams import cuda as hash_ngrams
from tilelang_ops.kv_cache.store_main import cuda as store_main

FINE = Report(registers=128, threads=256, shared_bytes=1024, matrix_instructions=4)
TARGETS = ("sm_90a", "sm_100a")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"error": "no such function"}, "no such function"),
        ({"spilled_bytes": 8}, "spilled_bytes=8"),
        ({"shared_bytes": 232449}, "shared_bytes=232449"),
        ({"registers": 255, "threads": 512}, "threads=512"),
        ({"matrix_instructions": 0}, "no matrix instruction"),
    ],
)
def test_limits(change: dict, message: str) -> None:
    check(FINE, uses_tensor_cores=True)
    with pytest.raises(AssertionError, match=message):
        check(replace(FINE, **change), uses_tensor_cores=True)


def test_operands_in_registers() -> None:
    """Four instructions of 16 bytes each: 64 codes, or 16 words of four, 16 bytes of which are 4 words."""
    source = """
  {kind} decoded[{count}];
        for (int ki = 0; ki < 4; ++ki) {{
          tl::wgmma_rs<kFloat8_e4m3, 64>(reinterpret_cast<const uint32_t*>(decoded + (ki * {each})), x);
"""
    check_operands(source.format(kind="fp8_e4_t", count=64, each=16))
    check_operands(source.format(kind="uint", count=16, each=4))
    with pytest.raises(AssertionError, match=r"reads decoded\[\.\. 51\], which has 16 elements"):
        check_operands(source.format(kind="uint", count=16, each=16))


def factory(make) -> KernelFactory:
    """A factory outside the package."""
    return KernelFactory(make, f"tests.{make.__name__}", TARGETS, lambda model: [], {}, make is product)


def scale(factor: float):
    """out = x * factor."""
    n = T.dynamic("n")

    def scale(x, out):
        with T.Kernel(T.ceildiv(n, 128), threads=128) as block:
            for i in T.Parallel(128):
                if block * 128 + i < n:
                    out[block * 128 + i] = x[block * 128 + i] * factor

    return _program(scale, x=T.Tensor((n,), "float32"), out=T.Tensor((n,), "float32"))


def unknown(size: int):
    """Calls a function that no header declares."""

    def unknown(x):
        with T.Kernel(1, threads=128):
            x[0] = T.call_extern("float32", "no_such_function", x[1])

    return _program(unknown, x=T.Tensor((size,), "float32"))


def large(size: int):
    """Takes more shared memory than there is."""

    def large(x):
        with T.Kernel(1, threads=128):
            tile = T.alloc_shared((size,), "float32")
            T.copy(x, tile)
            for i in T.Parallel(size):
                x[i] = tile[size - 1 - i]

    return _program(large, x=T.Tensor((size,), "float32"))


def product(size: int):
    """A matrix product by the instructions of sm_90a; on sm_100a those of older architectures serve."""

    def product(a, b, c):
        with T.Kernel(1, threads=128):
            left = T.alloc_shared((size, size), "bfloat16")
            right = T.alloc_shared((size, size), "bfloat16")
            sums = T.alloc_fragment((size, size), "float32")
            T.copy(a, left)
            T.copy(b, right)
            T.gemm(left, right, sums, transpose_B=True, clear_accum=True)
            T.copy(sums, c)

    square = T.Tensor((size, size), "bfloat16")
    return _program(product, a=square, b=square, c=T.Tensor((size, size), "float32"))


def _program(function, **annotations):
    # This file's annotations are strings, in which TileLang finds no local names.
    function.__annotations__ = annotations
    return T.prim_func(function)


@pytest.fixture
def lowered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Program, str, str]]:
    """Nothing is remembered before the test; programs, targets and sources as they are lowered."""
    monkeypatch.setattr(build_cache, "build_cache", lambda name: tmp_path)
    found = []

    def lower(program: Program, traced: Any, target: str) -> Any:
        result = plain(program, traced, target)
        found.append((program, target, result.body))
        return result

    plain = compile_checks._lower
    monkeypatch.setattr(compile_checks, "_lower", lower)
    return found


def test_faults_are_reported_one_by_one(lowered: list) -> None:
    """Programs with the same includes share a translation unit; one that fails does not take others along."""
    good, bad = factory(scale)(factor=2.0), factory(unknown)(size=8)
    big, matrix = factory(large)(size=65536), factory(product)(size=64)
    jobs = [(program, "sm_90a") for program in (good, bad, big, matrix)]
    reports = compile_all([*jobs, (matrix, "sm_100a")])
    check(reports[good, "sm_90a"], uses_tensor_cores=False)
    assert "no_such_function" in reports[bad, "sm_90a"].error
    assert reports[big, "sm_90a"].shared_bytes == 4 * 65536
    check(reports[matrix, "sm_90a"], uses_tensor_cores=True)
    with pytest.raises(AssertionError, match="no matrix instruction"):
        check(reports[matrix, "sm_100a"], uses_tensor_cores=True)
    del jobs[1]
    count = len(lowered)
    assert compile_all(jobs) == {job: reports[job] for job in jobs}
    assert len(lowered) == count, "lowered again"


def test_a_change_that_leaves_the_program_compiles_nothing(
    lowered: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compile_checks, "_compile", lambda batch, *_: [FINE] * len(batch))
    make, state = factory(scale), "of the files"
    monkeypatch.setattr(Program, "file_name", lambda program, target: f"{state}{program}{target}")

    def count(program: Program, target: str) -> int:
        """Programs lowered until its report is there."""
        assert compile_all([(program, target)]) == {(program, target): FINE}
        return len(lowered)

    assert count(make(factor=2.0), "sm_90a") == 1
    state = "of other files"
    assert count(make(factor=2.0), "sm_90a") == 1
    assert count(make(factor=3.0), "sm_90a") == 2
    assert count(make(factor=2.0), "sm_100a") == 3
    state = "of yet others"
    with_options = replace(make, pass_configs={"tl.enable_fast_math": True}, _programs={})
    assert count(with_options(factor=2.0), "sm_90a") == 4


@pytest.mark.parametrize("module", [hash_ngrams, store_main], ids=["same source", "another source"])
def test_shared_passes_give_what_passes_of_its_own_give(module: ModuleType) -> None:
    """The source for the second architecture, which for some programs is that for the first."""
    program = module.kernel(**module.kernel.builds(RELEASE)[0])
    passes, sources = SharedPasses(), {}
    for target in TARGETS:
        with passes.applied():
            sources[target] = compile_checks._lower(program, program.trace(target), target)
    alone = compile_checks._lower(program, program.trace("sm_100a"), "sm_100a")
    assert passes.taken > 3
    assert sources["sm_100a"] == alone
    assert (sources["sm_90a"] == alone) == (module is hash_ngrams)
