"""Run the CUDA kernels of an operator on the CPU, from their traced programs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from tests.support.emulator import EmulatedProgram
from tilelang_ops.common.kernels import ASCEND_TARGET, Program, running_with

_built: dict[tuple[Program, str, bool], EmulatedProgram] = {}


@contextmanager
def traced(
    target: str = "sm_90a", *, reverse: bool = False, contract: bool = False, allow_outside: bool = False
) -> Iterator[None]:
    """Programs called inside run on the CPU.

    Tensors that are allocated inside without a value hold NaN, or the largest integer: what a kernel leaves
    unwritten shows.

    Args:
        target: architecture that programs are traced for.
        reverse: run blocks, parallel loops and threads in descending order.
        contract: fuse products with sums where the compiler likes, as nvcc does.
        allow_outside: let accesses outside tensors read 0 and write nothing, as TileLang's guards do; else
            they are an error.
    """

    def run(program: Program, arguments: tuple) -> None:
        key = program, target, contract
        if key not in _built:
            # On Ascend's vector cores a CUDA program does what it says: it runs as it stands.
            is_ported = target == ASCEND_TARGET and program.factory.is_cuda
            text = program.factory.make(**program.sizes) if is_ported else program.trace(target)
            _built[key] = EmulatedProgram(text, contract=contract)
        _built[key](*arguments, reverse=reverse, allow_outside=allow_outside)

    with running_with(run), _filled_allocations():
        yield


@contextmanager
def _filled_allocations() -> Iterator[None]:
    # Not use_deterministic_algorithms, which imports torch's compiler.
    before = torch.get_deterministic_debug_mode()
    did_fill = torch.utils.deterministic.fill_uninitialized_memory
    torch.set_deterministic_debug_mode("warn")
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before)
        torch.utils.deterministic.fill_uninitialized_memory = did_fill
