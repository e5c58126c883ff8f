"""Cases of the row gathers."""

from __future__ import annotations

import torch
from torch import Tensor

from examples.kernel_cases.case import Case
from tilelang_ops.memory import gather_rows

HIDDEN, VOCABULARY = 5120, 129280


def cases() -> list[Case]:
    """The cases of this family."""
    return [_gather(rows, divisor) for rows in (256, 4096) for divisor in (1, 6)]


def _gather(rows: int, divisor: int) -> Case:
    """Embeddings of tokens, or the rows of a grouped product in the order of its slots."""
    num_rows = VOCABULARY if divisor == 1 else rows
    source = torch.randn(num_rows, HIDDEN, device="cuda").bfloat16()

    def make(seed: int) -> tuple[Tensor]:
        generator = torch.Generator("cuda").manual_seed(seed)
        index = torch.randperm(num_rows * divisor, generator=generator, device="cuda")[: rows * divisor]
        return (index.int(),)

    def in_torch(index: Tensor) -> Tensor:
        return source.index_select(0, index // divisor)

    return Case(
        op="memory.gather_rows",
        size=f"{rows * divisor} of {num_rows} rows, {HIDDEN} channels",
        bytes=rows * HIDDEN * 2 * (1 + divisor),
        flops=0,
        make=make,
        run=lambda index: gather_rows(source, index, divisor),
        torch=in_torch,
        check=lambda out, args: torch.testing.assert_close(out, in_torch(*args), rtol=0, atol=0),
    )
