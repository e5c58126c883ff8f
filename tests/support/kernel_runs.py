"""Run an operator's kernels: on a GPU where there is one, and from their traced programs on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from tests.support.compare import assert_same_bits
from tests.support.traced import traced
from tilelang_ops.common.kernels import ASCEND_TARGET, CUDA_TARGETS

# Families, or operators, whose programs differ between the CUDA architectures; others are traced for the
# first alone.
WITH_VARIANTS = ("attention", "gemm", "indexer", "sampling.markov_step", "sampling.sample_tokens")


def places(family: str, op: str) -> list[str]:
    """Where an operator is tested: traced for each architecture, and on the GPU if there is one."""
    has_variants = family in WITH_VARIANTS or f"{family}.{op}" in WITH_VARIANTS
    traced_for = CUDA_TARGETS if has_variants else CUDA_TARGETS[:1]
    return [*traced_for, *(["cuda"] if torch.cuda.is_available() else [])]


@dataclass(frozen=True)
class KernelRunner:
    """Where kernels run: "cuda" is the device, an architecture the CPU run of the program traced for it.

    Attributes:
        place: one of `places`, or Ascend: there what has products runs the program in `ascend.py`.
        allow_outside: the program may reach outside its tensors, where TileLang's guards answer: tiles that
            hang over the end of a tensor.
        contract: also run with products fused into sums, as nvcc may; the bits must stay.
    """

    place: str
    allow_outside: bool = False
    contract: bool = False

    def overhanging(self) -> KernelRunner:
        """For kernels whose tiles hang over the end of their tensors."""
        return replace(self, allow_outside=True)

    def contracting(self) -> KernelRunner:
        """For kernels whose bits are promised: nothing may depend on fused products."""
        return replace(self, contract=True)

    def __call__(self, module: ModuleType, *args: Any, **kwargs: Any) -> tuple[Any, Sequence[Any]]:
        """`module.run(...)` on copies of the arguments.

        The traced program runs twice, blocks and parallel loops forwards and backwards, and must give the
        same bits; on a device the kernel runs twice likewise.

        Args:
            module: a backend module, `tilelang_ops.<family>.<op>.cuda`; for Ascend its sibling runs.
            args, kwargs: of its `run`; tensors on the CPU.

        Returns:
            the result, and the arguments as `run` left them; all on the CPU.
        """
        if self.place == ASCEND_TARGET:
            module = import_module(f"{module.__package__}.ascend")
        first = self._once(module, args, kwargs)
        self._compare(first, self._once(module, args, kwargs, reverse=True), "forwards and backwards")
        if self.contract and self.place != "cuda":
            fused = self._once(module, args, kwargs, contract=True)
            self._compare(first, fused, "products rounded and fused")
        return first

    @staticmethod
    def _compare(a: Any, b: Any, what: str) -> None:
        for x, y in zip(_tensors(a), _tensors(b), strict=True):
            assert_same_bits(x, y, what)

    def _once(
        self, module: ModuleType, args: Any, kwargs: Any, reverse: bool = False, contract: bool = False
    ) -> tuple[Any, Sequence[Any]]:
        device = "cuda" if self.place == "cuda" else "cpu"
        args = [_copy(a, device) for a in args]
        kwargs = {k: _copy(v, device) for k, v in kwargs.items()}
        if self.place == "cuda":
            result = module.run(*args, **kwargs)
            torch.cuda.synchronize()
        else:
            # A copy of a tile to or from an Ascend core ends where the tensor does.
            allow_outside = self.allow_outside or self.place == ASCEND_TARGET
            with traced(self.place, reverse=reverse, contract=contract, allow_outside=allow_outside):
                result = module.run(*args, **kwargs)
        return _to_cpu(result), [_to_cpu(a) for a in (*args, *kwargs.values())]


def _copy(value: Any, device: str) -> Any:
    """A copy with the same strides: kernels address strided pools."""
    if is_dataclass(value):
        return replace(value, **{f.name: _copy(getattr(value, f.name), device) for f in fields(value)})
    if not isinstance(value, Tensor):
        return value
    storage = torch.empty(0, dtype=value.dtype, device=value.device).set_(
        value.untyped_storage(), 0, (value.untyped_storage().nbytes() // value.element_size(),)
    )
    whole = storage.to(device, copy=True)
    return whole.as_strided(value.shape, value.stride(), value.storage_offset())


def _to_cpu(value: Any) -> Any:
    if is_dataclass(value):
        return replace(value, **{f.name: _to_cpu(getattr(value, f.name)) for f in fields(value)})
    if isinstance(value, tuple | list):
        return type(value)(_to_cpu(v) for v in value)
    return _copy(value, "cpu")


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if is_dataclass(value):
        value = [getattr(value, f.name) for f in fields(value)]
    return [t for v in value for t in _tensors(v)] if isinstance(value, tuple | list) else []
