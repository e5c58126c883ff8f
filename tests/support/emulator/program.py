"""Builds a printed program and calls it with tensors."""

from __future__ import annotations

import ctypes
import hashlib
import os
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.support.build_cache import build_cache, write_whole
from tests.support.emulator.nodes import C_TYPES, c_type, kind_of
from tests.support.emulator.statements import Statements

RUNTIME = Path(__file__).parent / "runtime"
# -fwrapv: 64-bit and unsigned arithmetic wraps, as on the device; overflow of 32-bit indices is caught apart.
FLAGS = ["-std=c++20", "-fwrapv", "-fPIC", "-w"]
# Compiling takes longer than running: no more optimisation than fusing needs.
CONTRACTIONS = {False: ("-O1", "-ffp-contract=off"), True: ("-O2", "-ffp-contract=fast")}
# Time of -O1 grows faster than the text: from here on it takes longer than slow code does.
LONG_TEXT = 100_000  # characters


class EmulationError(AssertionError):
    """The program did something that is a fault on every device."""


class _Tensor(ctypes.Structure):
    _fields_ = (("data", ctypes.c_void_p), ("begin", ctypes.c_int64), ("end", ctypes.c_int64))


class EmulatedProgram:
    """A traced TileLang program that runs on the CPU: call it with tensors and scalars in parameter order."""

    def __init__(self, program: Any, *, contract: bool = False) -> None:
        """Print and build; equal text is built once a machine.

        Args:
            program: a PrimFunc as traced, before any lowering.
            contract: fuse products with sums where the compiler likes, as nvcc does.

        Raises:
            Unsupported: the program uses what the emulator does not know.
        """
        self._program = program
        self._symbols: list[list[tuple[str, int, int]]] = []  # where each integer comes from
        self.source = self._print()
        self._function = ctypes.CDLL(str(_build(self.source, contract))).emulate

    def __call__(self, *arguments: Any, reverse: bool = False, allow_outside: bool = False) -> int:
        """Run on CPU tensors.

        Args:
            arguments: tensors and numbers, one a parameter.
            reverse: blocks, parallel loops and threads in descending order.
            allow_outside: let accesses outside global tensors read 0 and write nothing.

        Returns:
            accesses outside global tensors.

        Raises:
            EmulationError: the program stopped.
            TypeError: an argument does not fit its parameter.
        """
        self._check(arguments)
        tensors = (_Tensor * max(1, len(arguments)))()
        numbers = (ctypes.c_double * max(1, len(arguments)))()
        whole = (ctypes.c_int64 * max(1, len(arguments)))()
        for k, value in enumerate(arguments):
            if isinstance(value, Tensor):
                tensors[k] = _argument(value)
            elif value is not None:
                numbers[k], whole[k] = float(value), int(value)
        symbols = [self._value(places, arguments) for places in self._symbols]
        integers = (ctypes.c_int64 * max(1, len(symbols)))(*symbols)
        message, outside = ctypes.create_string_buffer(512), ctypes.c_int64()
        is_stopped = self._function(
            tensors,
            numbers,
            whole,
            integers,
            int(reverse),
            int(allow_outside),
            message,
            ctypes.byref(outside),
        )
        if is_stopped:
            name = self._program.attrs["global_symbol"] if self._program.attrs else "program"
            raise EmulationError(f"{name}: {message.value.decode()}")
        return outside.value

    def _print(self) -> str:
        printer = Statements(self._program)
        for k, parameter in enumerate(self._program.params):
            buffer = self._program.buffer_map.get(parameter)
            if buffer is not None:
                name, text = printer.name(buffer.data), f"tensors[{k}]"
                fields = f"(uint8_t*){text}.data, nullptr, {text}.begin, {text}.end"
                printer.write(f'[[maybe_unused]] const Buffer {name}{{{fields}, "{buffer.name}"}};')
            else:
                kind = c_type(parameter.dtype)
                source = f"numbers[{k}]" if "float" in str(parameter.dtype) else f"whole[{k}]"
                printer.write(
                    f"[[maybe_unused]] const {kind} {printer.name(parameter)} = cast<{kind}>({source});"
                )
        self._print_symbols(printer)
        printer.statement(self._program.body)
        body = "\n".join(printer.lines)
        return f"""#include "runtime.hpp"
using namespace emulator;
extern "C" int emulate(const EmulatorTensor* tensors, const double* numbers, const int64_t* whole,
                       const int64_t* symbols, int reverse, int allow_outside, char* message,
                       int64_t* outside) {{
    run = Run();
    run.reverse = reverse;
    run.allow_outside = allow_outside;
    bool is_stopped = false;
    try {{
{body}
    }} catch (Failure&) {{
        is_stopped = true;
    }}
    std::memcpy(message, run.message, sizeof run.message);
    *outside = run.outside;
    return is_stopped;
}}
"""

    def _print_symbols(self, printer: Statements) -> None:
        """Variables in shapes and strides take their values from the tensors."""
        known = dict.fromkeys(self._program.params)
        for k, parameter in enumerate(self._program.params):
            buffer = self._program.buffer_map.get(parameter)
            for what in ("shape", "strides") if buffer is not None else ():
                for axis, size in enumerate(getattr(buffer, what)):
                    if kind_of(size) != "Var":
                        continue
                    if size not in known:
                        kind = c_type(size.dtype)
                        printer.write(
                            f"const {kind} {printer.name(size)} = {kind}(symbols[{len(self._symbols)}]);"
                        )
                        known[size] = []
                        self._symbols.append(known[size])
                    if known[size] is not None:
                        known[size].append((what, k, axis))

    @staticmethod
    def _value(places: list[tuple[str, int, int]], arguments: tuple[Any, ...]) -> int:
        """Value of a size that stands at these places of tensors, from one that is given."""
        for what, k, axis in places:
            if arguments[k] is not None:
                return _sizes(arguments[k], what)[axis]
        raise TypeError("a size of the program stands in no given tensor")

    def _check(self, arguments: tuple[Any, ...]) -> None:
        """What the launcher of the compiled kernel checks too: number, types, fixed sizes and strides."""
        parameters = self._program.params
        if len(arguments) != len(parameters):
            raise TypeError(f"{len(arguments)} arguments for {len(parameters)} parameters")
        for parameter, value in zip(parameters, arguments):
            buffer = self._program.buffer_map.get(parameter)
            if value is None and buffer is not None:  # for a tensor that the program does not touch
                continue
            if isinstance(value, Tensor) != (buffer is not None):
                raise TypeError(f"{parameter.name}: {type(value).__name__} given")
            if buffer is None:
                continue
            dtype = str(value.dtype).removeprefix("torch.")
            if C_TYPES.get(dtype.removesuffix("_x2")) != c_type(buffer.dtype):
                raise TypeError(f"{buffer.name} is {buffer.dtype}, got {dtype}")
            if len(buffer.shape) != value.dim():
                raise TypeError(f"{buffer.name} has shape {list(buffer.shape)}, got {list(value.shape)}")
            for what, wanted in (("shape", buffer.shape), ("strides", buffer.strides)):
                given = _sizes(value, what)
                for axis, (w, g) in enumerate(zip(wanted, given)):
                    is_free = what == "strides" and (value.shape[axis] == 1 or value.numel() == 0)
                    if kind_of(w) == "IntImm" and int(w) != g and not is_free:
                        raise TypeError(f"{buffer.name} has {what} {list(wanted)}, got {list(given)}")


def _sizes(tensor: Tensor, what: str) -> tuple[int, ...]:
    """Shape or strides in the program's elements: torch counts pairs of four-bit ones."""
    pair = 2 if tensor.dtype == torch.float4_e2m1fn_x2 else 1
    if what == "shape":
        return (*tensor.shape[:-1], tensor.shape[-1] * pair)
    return (*(stride * pair for stride in tensor.stride()[:-1]), tensor.stride(-1))


def _argument(tensor: Tensor) -> _Tensor:
    if tensor.device.type != "cpu":
        raise TypeError(f"a tensor on {tensor.device} in an emulated program")
    before = tensor.storage_offset() * tensor.element_size()
    return _Tensor(tensor.data_ptr(), -before, tensor.untyped_storage().nbytes() - before)


@cache
def _compiler() -> tuple[str, ...]:
    """Command of the C++ compiler with the flags of every build."""
    native = ["-mfma"] if os.uname().machine == "x86_64" else []
    return (*os.environ.get("CXX", "g++").split(), *FLAGS, *native)


@cache
def _prepared_headers(contract: bool) -> Path:
    """Directory with the runtime and its precompiled header, made once for a text of it."""
    texts = {path.name: path.read_text() for path in sorted(RUNTIME.glob("*.hpp"))}
    command = [*_compiler(), *CONTRACTIONS[contract]]
    key = hashlib.sha256(repr((texts, command)).encode()).hexdigest()[:16]
    directory = build_cache("emulator") / key
    if not (directory / "runtime.hpp.gch").exists():
        directory.mkdir(exist_ok=True)
        for name, text in texts.items():
            write_whole(directory / name, text)
        partial = directory / f"gch.{os.getpid()}"
        _compile([*command, "-x", "c++-header", str(directory / "runtime.hpp"), "-o", str(partial)])
        partial.replace(directory / "runtime.hpp.gch")
    return directory


def _build(source: str, contract: bool) -> Path:
    headers = _prepared_headers(contract)
    stem = headers / hashlib.sha256(source.encode()).hexdigest()[:24]
    library = stem.with_suffix(".so")
    if not library.exists():
        text = stem.with_suffix(f".{os.getpid()}.cpp")
        partial = stem.with_suffix(f".{os.getpid()}.so")
        text.write_text(source)
        options = list(CONTRACTIONS[contract])
        if len(source) > LONG_TEXT and not contract:
            options[0] = "-O0"
        _compile([*_compiler(), *options, "-shared", f"-I{headers}", str(text), "-o", str(partial)])
        text.replace(stem.with_suffix(".cpp"))
        partial.replace(library)
    return library


def _compile(command: list[str]) -> None:
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{result.stderr[:3000]}")
