"""From a kernel factory to a function that takes tensors.

A backend module decorates its factory, a function of compile-time sizes that returns a TileLang program:

    @cuda_kernel(builds=lambda model: [{"width": model.hidden}])
    def kernel(width: int) -> PrimFunc: ...

    def run(x: Tensor, out: Tensor) -> None:
        kernel(width=x.shape[1])(x, out)

A factory knows no device: what depends on one (`arch`, `num_sms`) are arguments. The first call with tensors
of an architecture compiles the program for it, or loads it from a library of prebuilt kernels
(`python -m tilelang_ops.build`); later calls find it in a dictionary. A launch goes to the current stream of
its tensors' device, allocates nothing and waits for nothing.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tilelang_ops.common.sizes import ModelSizes

log = logging.getLogger(__name__)

CUDA_TARGETS = ("sm_90a", "sm_100a")
ASCEND_TARGET = "dav-3510"
Sizes = Mapping[str, Any]
Launch = Callable[..., None]


@dataclass(frozen=True, eq=False)
class KernelFactory:
    """A factory of TileLang programs, and which of them a model needs.

    Attributes:
        make: compile-time sizes in, a PrimFunc out; `arch` is passed when it has such a parameter.
        name: package of the operator, with the function's name where a module has several factories.
        targets: architectures it is written for.
        builds: sizes of the programs that a model of given sizes launches.
        pass_configs: options of TileLang's compiler.
        uses_tensor_cores: its binary must contain the architecture's own matrix instructions.
        is_cuda: written in the CUDA dialect. For Ascend such a program runs on the vector cores.
    """

    make: Callable[..., Any]
    name: str
    targets: tuple[str, ...]
    builds: Callable[[ModelSizes], Sequence[Sizes]]
    pass_configs: Sizes
    uses_tensor_cores: bool = False
    is_cuda: bool = True
    _programs: dict[tuple[Any, ...], Program] = field(default_factory=dict)

    def __call__(self, **sizes: Any) -> Program:
        """The program of these sizes; every call with equal sizes gives the same object."""
        key = tuple(sizes.items())
        program = self._programs.get(key)
        if program is None:
            program = self._programs[key] = Program(self, dict(sizes))
        return program

    @property
    def symbol(self) -> str:
        """Name of the TileLang program, and of the function in a prebuilt library."""
        return self.name.rpartition(".")[2]

    @property
    def source_files(self) -> tuple[Path, ...]:
        """The factory's own file, and those of this package that it imports, directly or not."""
        return _imported_files(self.make.__module__)


@cache
def _imported_files(module: str) -> tuple[Path, ...]:
    root = Path(__file__).parents[2]
    found: dict[str, Path] = {}
    names = [module]
    while names:
        name = names.pop()
        stem = root.joinpath(*name.split("."))
        path = stem / "__init__.py" if stem.is_dir() else stem.with_suffix(".py")
        if name in found or not path.exists():
            continue
        found[name] = path
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tilelang_ops."):
                names += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return tuple(sorted(found.values()))


@dataclass(frozen=True, eq=False)
class Program:
    """A kernel of fixed sizes: call it with tensors and scalars in the order of its parameters."""

    factory: KernelFactory
    sizes: Sizes
    _launches: dict[torch.device, Launch] = field(default_factory=dict)

    def __call__(self, *arguments: Any) -> None:
        if _runner is not None:
            _runner(self, arguments)
            return
        device = next(a.device for a in arguments if isinstance(a, Tensor))
        launch = self._launches.get(device)
        if launch is None:
            launch = self._launches[device] = load(self, target_of(device))
        launch(*arguments)

    def trace(self, target: str) -> Any:
        """The TileLang program, before any lowering.

        Raises:
            ValueError: the factory is not written for this target.
        """
        if target not in self.factory.targets:
            raise ValueError(f"{self}: no kernel for {target!r}, only for {', '.join(self.factory.targets)}")
        is_ported = target == ASCEND_TARGET and self.factory.is_cuda
        takes_arch = "arch" in inspect.signature(self.factory.make).parameters
        arch = {"arch": CUDA_TARGETS[0] if is_ported else target} if takes_arch else {}
        program = self.factory.make(**self.sizes, **arch)
        if is_ported:
            from tilelang_ops.common.vector_cores import on_vector_cores

            program = on_vector_cores(program)
        return program

    def file_name(self, target: str) -> str:
        """Name of the prebuilt kernel: changes with sizes, options, target and source."""
        text = repr((sorted(self.sizes.items()), sorted(self.factory.pass_configs.items())))
        parts = [text.encode(), *(path.read_bytes() for path in self.factory.source_files)]
        return f"{self.factory.name}.{target}.{hashlib.sha256(b'|'.join(parts)).hexdigest()[:20]}.so"

    def __str__(self) -> str:
        return f"{self.factory.name}({', '.join(f'{k}={v}' for k, v in self.sizes.items())})"


def cuda_kernel(
    *,
    builds: Callable[[ModelSizes], Sequence[Sizes]],
    targets: tuple[str, ...] | None = None,
    pass_configs: Sizes | None = None,
    uses_tensor_cores: bool = False,
) -> Callable[[Callable[..., Any]], KernelFactory]:
    """Decorate a factory of CUDA kernels; the arguments are `KernelFactory`'s.

    Without `targets` these are both CUDA architectures and, for a kernel without matrix products, Ascend.
    """
    if targets is None:
        targets = CUDA_TARGETS if uses_tensor_cores else (*CUDA_TARGETS, ASCEND_TARGET)

    def decorate(make: Callable[..., Any]) -> KernelFactory:
        package = make.__module__.rpartition(".")[0].removeprefix("tilelang_ops.")
        name = package if make.__name__ == "kernel" else f"{package}.{make.__name__}"
        return KernelFactory(make, name, targets, builds, pass_configs or {}, uses_tensor_cores)

    return decorate


def ascend_kernel(
    *,
    builds: Callable[[ModelSizes], Sequence[Sizes]],
    pass_configs: Sizes | None = None,
    uses_tensor_cores: bool = False,
) -> Callable[[Callable[..., Any]], KernelFactory]:
    """Decorate a factory in the Ascend dialect; `uses_tensor_cores` asks for products on the cube cores."""
    decorate = cuda_kernel(
        builds=builds,
        targets=(ASCEND_TARGET,),
        pass_configs=pass_configs,
        uses_tensor_cores=uses_tensor_cores,
    )
    return lambda make: replace(decorate(make), is_cuda=False)


def compiler_target(target: str) -> dict[str, str]:
    """TileLang's name of a target."""
    return {"kind": "ascend" if target == ASCEND_TARGET else "cuda", "arch": target}


@cache
def target_of(device: torch.device) -> str:
    """Architecture that kernels for tensors of `device` are built for.

    Raises:
        ValueError: kernels are written for other architectures only.
    """
    if device.type == "npu":
        return ASCEND_TARGET
    major, minor = torch.cuda.get_device_capability(device)
    target = f"sm_{major}{minor}a"
    if target not in CUDA_TARGETS:
        raise ValueError(
            f"{torch.cuda.get_device_name(device)} is {target}; kernels: {', '.join(CUDA_TARGETS)}"
        )
    return target


@cache
def num_sms(device: torch.device) -> int:
    """Multiprocessors of a GPU, for kernels that start as many blocks as run at once."""
    if device.type == "cpu":
        return 3  # a program that is emulated there: few, so that its blocks take several turns
    return torch.cuda.get_device_properties(device).multi_processor_count


_library: Path | None = None
_runner: Callable[[Program, tuple[Any, ...]], None] | None = None


def use_library(directory: Path | None) -> None:
    """Look for prebuilt kernels in `directory` before compiling; None compiles everything."""
    global _library
    _library = directory


@contextmanager
def running_with(runner: Callable[[Program, tuple[Any, ...]], None]) -> Iterator[None]:
    """Hand programs and their arguments to `runner` instead of a device, for tests without one."""
    global _runner
    before, _runner = _runner, runner
    try:
        yield
    finally:
        _runner = before


def load(program: Program, target: str) -> Launch:
    """The program for a target: prebuilt where the library has it, else compiled now."""
    if _library is not None:
        path = _library / program.file_name(target)
        if path.exists():
            return open_library(path, program)
        log.warning("%s is not in %s: compiling it for %s", program, _library, target)
    return compile_program(program, target)


def open_library(path: Path, program: Program) -> Launch:
    """The function of a prebuilt kernel; needs no compiler of any kind."""
    import tilelang  # noqa: F401  loads the run-time library that knows the devices
    import tvm_ffi

    return tvm_ffi.load_module(str(path))[program.factory.symbol]


def compile_program(program: Program, target: str) -> Any:
    """TileLang's compiled kernel; needs the target's device compiler."""
    import tilelang

    return tilelang.compile(
        program.trace(target),
        target=compiler_target(target),
        pass_configs=dict(program.factory.pass_configs),
    )
