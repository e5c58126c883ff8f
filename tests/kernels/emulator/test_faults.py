"""Faults of a program that the emulator must find."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tests.kernels.emulator import programs
from tests.support.emulator import EmulatedProgram, EmulationError, Unsupported
from tests.support.kernel_runs import KernelRunner
from tilelang_ops.engram.gate_streams import cuda, reference


@pytest.mark.parametrize("offset", [1, -1])
def test_access_outside_a_tensor(offset: int) -> None:
    x, out = torch.arange(5.0), torch.empty(5)
    program = EmulatedProgram(programs.shifted(offset))
    where = "5 of 5" if offset > 0 else "-1 of 5"
    with pytest.raises(EmulationError, match=rf"global x\[{where}\]"):
        program(x, out)
    assert program(x, out, allow_outside=True) == 1
    expected = [1.0, 2.0, 3.0, 4.0, 0.0] if offset > 0 else [0.0, 0.0, 1.0, 2.0, 3.0]
    assert out.tolist() == expected


def test_tile_over_the_end() -> None:
    x, out = torch.arange(6.0), torch.empty(6)
    program = EmulatedProgram(programs.tail(4))
    with pytest.raises(EmulationError, match=r"global x\[6 of 6\]"):
        program(x, out)
    assert program(x, out, allow_outside=True) == 4  # two elements read, two written
    assert torch.equal(out, x)


def test_unwritten_values_pass_through_copies_and_fail_in_expressions() -> None:
    x = torch.arange(8.0)
    out = torch.zeros(8)
    EmulatedProgram(programs.half_filled(reads_all=False))(x, out)
    assert out.tolist() == [0.0, 2.0, 4.0, 6.0, 0.0, 0.0, 0.0, 0.0]
    with pytest.raises(EmulationError, match="never written"):
        EmulatedProgram(programs.half_filled(reads_all=True))(x, out)


def test_overrun_of_shared_memory() -> None:
    with pytest.raises(EmulationError, match=r"out of bounds: scratch shared\[8 of 8\]"):
        EmulatedProgram(programs.scratch_overrun())(torch.zeros(9), torch.zeros(9))


def test_index_arithmetic_that_overflows() -> None:
    out = torch.empty(1, dtype=torch.int64)
    program = EmulatedProgram(programs.large_index())
    program(torch.tensor([2**14], dtype=torch.int32), out)
    assert out.item() == 2**30
    with pytest.raises(EmulationError, match="int32 overflow"):
        program(torch.tensor([2**15], dtype=torch.int32), out)


def test_missing_barrier() -> None:
    x = torch.arange(64, dtype=torch.int32)
    program = EmulatedProgram(programs.exchange(64, has_barrier=False))
    with pytest.raises(EmulationError, match="never written"):
        program(x, torch.empty_like(x))


def test_threads_that_wait_for_different_things() -> None:
    program = EmulatedProgram(programs.diverging(64))
    with pytest.raises(EmulationError, match="diverged"):
        program(torch.zeros(64, dtype=torch.int32))


def test_nobody_arrives_at_a_named_barrier() -> None:
    program = EmulatedProgram(programs.relay(arrives=False))
    with pytest.raises(EmulationError, match="diverged"):
        program(torch.zeros(32, dtype=torch.uint32), torch.zeros(32, dtype=torch.uint32))


def test_waiting_for_a_copy_that_nobody_starts() -> None:
    with pytest.raises(EmulationError, match="diverged"):
        EmulatedProgram(programs.awaited_copies(copies=1, waits=2))(torch.zeros(32), torch.zeros(32))


def test_order_dependence_shows_in_reverse() -> None:
    x = torch.arange(8, dtype=torch.int32)
    program = EmulatedProgram(programs.race())
    results = []
    for reverse in (False, True):
        out = torch.empty(1, dtype=torch.int32)
        program(x, out, reverse=reverse)
        results.append(out.item())
    assert results == [7, 0]


def test_arguments_that_do_not_fit() -> None:
    program = EmulatedProgram(programs.race())
    out = torch.empty(1, dtype=torch.int32)
    for x, message in (
        (torch.zeros(8), "int32"),
        (torch.zeros(7, dtype=torch.int32), "shape"),
        (torch.zeros(16, dtype=torch.int32)[::2], "strides"),
        (torch.zeros(8, 1, dtype=torch.int32), "shape"),
    ):
        with pytest.raises(TypeError, match=message):
            program(x, out)


def test_what_is_unknown_is_said() -> None:
    import tilelang.language as T

    n = T.dynamic("n")
    annotations = {"x": T.Tensor((n,), "int32")}

    def program(x):
        with T.Kernel(n, threads=32) as i:
            x[i] = T.call_extern("int32", "some_function", x[i])

    program.__annotations__ = annotations
    with pytest.raises(Unsupported, match="some_function"):
        EmulatedProgram(T.prim_func(program))


# Faults planted in a kernel: each must fail the kernel's own comparison or stop the program.
MUTANTS = {
    "rows of a block": ("first + step * blocks", "first + step"),
    "squares of the stream": ("sums[1] += x * x", "sums[1] += x * y"),
    "guard of the last channels": ("thread < vectors", "thread <= vectors"),
    "value": ("key_value[row, num_streams, ", "key_value[row, stream, "),
    "warps": ("T.unroll(1, WARPS)", "T.unroll(2, WARPS)"),
    "sign": ("root, -root)", "-root, root)"),
    "floor under the root": ("T.max(T.abs(dot), MIN_DOT)", "T.abs(dot)"),
    "barrier": ("T.sync_threads()", "pass"),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutants_are_found(mutant: str, tmp_path: Path) -> None:
    before, after = MUTANTS[mutant]
    text = Path(cuda.__file__).read_text()
    assert before in text
    module = _module(tmp_path / "mutant.py", text.replace(before, after))
    with pytest.raises(AssertionError):  # an EmulationError is one too
        _compare(module)


def test_the_kernel_without_a_mutation_passes() -> None:
    _compare(cuda)


def _compare(module: ModuleType) -> None:
    streams, key_value, weight = torch.randn(5, 4, 600), torch.randn(5, 5 * 600), torch.randn(4, 600)
    streams[1] = 0
    actual, _ = KernelRunner("sm_90a")(module, streams, key_value, weight, 1e-6)
    expected = reference.run(streams, key_value, weight, 1e-6)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


def _module(path: Path, text: str) -> ModuleType:
    path.write_text(text)
    module = ModuleType(path.stem)
    module.__file__ = str(path)
    sys.modules[path.stem] = module  # where TileLang looks for a program's globals
    exec(compile(text, str(path), "exec", dont_inherit=True), module.__dict__)
    return module
