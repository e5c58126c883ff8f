"""The checks themselves: each limit and each fault is noticed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import tilelang.language as T

from tests.support import compile_checks
from tests.support.compile_checks import Report, check, compile_all
from tilelang_ops.common.kernels import KernelFactory

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


def test_faults_are_reported_one_by_one(tmp_path, monkeypatch) -> None:
    """Programs with the same includes share a translation unit; one that fails does not take others along."""
    monkeypatch.setattr(compile_checks, "build_cache", lambda name: tmp_path)
    lowered = []
    lower = compile_checks._lower
    monkeypatch.setattr(compile_checks, "_lower", lambda *args: lowered.append(args) or lower(*args))
    good, other = factory(scale)(factor=2.0), factory(scale)(factor=3.0)
    bad, big, matrix = factory(unknown)(size=8), factory(large)(size=65536), factory(product)(size=64)
    reports = compile_all([good, bad, other, big, matrix], "sm_90a")
    for program in (good, other):
        check(reports[program], uses_tensor_cores=False)
    assert "no_such_function" in reports[bad].error
    assert reports[big].shared_bytes == 4 * 65536
    check(reports[matrix], uses_tensor_cores=True)
    count = len(lowered)
    assert compile_all([good, other, big], "sm_90a") == {p: reports[p] for p in (good, other, big)}
    assert len(lowered) == count, "compiled again"
    on_blackwell = compile_all([matrix], "sm_100a")[matrix]
    with pytest.raises(AssertionError, match="no matrix instruction"):
        check(on_blackwell, uses_tensor_cores=True)
