"""Cases of the row gathers."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from examples.kernel_cases.case import Case, equal, seeded
from tilelang_ops.memory import gather_rows

HIDDEN = 5120


def cases(small: bool = False) -> list[Case]:
    """The cases of this family."""
    sizes, vocabulary = ((3, 20), 50) if small else ((256, 4096), 129280)
    return [_gather(rows, divisor, vocabulary) for rows in sizes for divisor in (1, 6)]


@cache
def _source(rows: int, device: torch.device) -> Tensor:
    return torch.randn(rows, HIDDEN).bfloat16()


def _gather(rows: int, divisor: int, vocabulary: int) -> Case:
    """Embeddings of tokens, or the rows of a grouped product in the order of its slots."""
    num_rows = vocabulary if divisor == 1 else rows

    def make(seed: int) -> tuple[Tensor, Tensor]:
        index = torch.randperm(num_rows * divisor, generator=seeded(seed))[: rows * divisor]
        return _source(num_rows, torch.get_default_device()), index.int()

    def in_torch(source: Tensor, index: Tensor) -> Tensor:
        return source.index_select(0, index // divisor)

    return Case(
        op="memory.gather_rows",
        size=f"{rows * divisor} of {num_rows} rows, {HIDDEN} channels",
        bytes=rows * HIDDEN * 2 * (1 + divisor),
        flops=0,
        make=make,
        run=lambda source, index: gather_rows(source, index, divisor),
        torch=in_torch,
        check=equal(in_torch),
    )
