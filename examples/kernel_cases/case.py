"""One line of the kernel table, and checks that many cases share."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Check = Callable[[Any, tuple[Any, ...]], None]
BFLOAT16_RATE, FP8_RATE = 780e12, 1416e12  # operations/s of an H200's products


@dataclasses.dataclass(frozen=True)
class Case:
    """A kernel at one size.

    Attributes:
        op: the operator, `family.op`.
        size: the size in words.
        bytes: read and written once, as the operator's contract needs them.
        flops: of its matrix products; 0 where there are none.
        make: (seed) -> arguments of `run` and `torch`, on torch's default device; equal for equal seeds.
            Several are used in turn so that a measurement does not read its own cache.
        run: the kernel; it returns what it writes into its arguments as well.
        torch: the same work in torch, with a result of the same form.
        check: (result of `run`, arguments as `make` gives them) raises where the result is wrong.
        check_torch: the same for the result of `torch`, where that is rounded or drawn otherwise.
        rate: of its products, operations/s.
    """

    op: str
    size: str
    bytes: int
    flops: int
    make: Callable[[int], tuple[Any, ...]]
    run: Callable[..., Any]
    torch: Callable[..., Any]
    check: Check
    check_torch: Check | None = None
    rate: float = BFLOAT16_RATE

    def arguments(self, seed: int, device: str) -> tuple[Any, ...]:
        """Arguments on a device."""
        with torch.device(device):
            return self.make(seed)

    def try_run(self, device: str) -> None:
        """Run the kernel once and check its result."""
        self.check(self.run(*self.arguments(0, device)), self.arguments(0, device))

    def try_torch(self, device: str) -> None:
        """Do the work in torch once and check its result."""
        torch.manual_seed(0)
        check = self.check_torch or self.check
        check(self.torch(*self.arguments(0, device)), self.arguments(0, device))


def seeded(seed: int) -> torch.Generator:
    """A generator of random numbers on torch's default device."""
    return torch.Generator(torch.get_default_device()).manual_seed(seed)


def returning(place: int | slice, op: Callable[..., Any]) -> Callable[..., Any]:
    """`op`, which writes into its arguments, as a function that returns those of `place`."""

    def run(*args: Any) -> Any:
        op(*args)
        return args[place]

    return run


def tensors(result: Any) -> list[Tensor]:
    """The tensors of a result, in order."""
    if isinstance(result, Tensor):
        return [result]
    if dataclasses.is_dataclass(result):
        result = [getattr(result, field.name) for field in dataclasses.fields(result)]
    return [found for part in result or () for found in tensors(part)]


def equal(expected: Callable[..., Any]) -> Check:
    """Every bit is as `expected` has it."""
    return alike(expected, 0.0)


def alike(expected: Callable[..., Any], share: float) -> Check:
    """At most this share of a tensor's elements differs: codes of numbers that may be rounded otherwise."""

    def check(out: Any, args: tuple[Any, ...]) -> None:
        for place, (a, b) in enumerate(zip(tensors(out), tensors(expected(*args)), strict=True)):
            assert a.shape == b.shape and a.dtype == b.dtype, (
                f"result {place}: {a.shape=} {b.shape=} {a.dtype=}"
            )
            differing = int((a != b).sum())
            assert differing <= share * a.numel(), (
                f"result {place}: {differing} of {a.numel()} elements differ"
            )

    return check


def near(expected: Callable[..., Any], rtol: float, atol: float) -> Check:
    """Every number is as close to `expected`'s as this."""

    def check(out: Any, args: tuple[Any, ...]) -> None:
        for a, b in zip(tensors(out), tensors(expected(*args)), strict=True):
            torch.testing.assert_close(a.double(), b.double(), rtol=rtol, atol=atol)

    return check
