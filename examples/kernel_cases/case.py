"""One line of the kernel table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Case:
    """A kernel at one size.

    Attributes:
        op: the operator, `family.op`.
        size: the size in words.
        bytes: read and written once, as the operator's contract needs them.
        flops: of its matrix products; 0 where there are none.
        make: (seed) -> arguments of `run` and `torch`, on the GPU. Called several times: copies are used in
            turn so that a measurement does not read its own cache.
        run: the kernel.
        torch: the same work in torch.
        check: (result of run, arguments) raises where the result is wrong.
    """

    op: str
    size: str
    bytes: int
    flops: int
    make: Callable[[int], tuple[Any, ...]]
    run: Callable[..., Any]
    torch: Callable[..., Any] | None
    check: Callable[[Any, tuple[Any, ...]], None]
