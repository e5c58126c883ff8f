"""Cases of the compressor's pooling."""

from __future__ import annotations

import torch
from torch import Tensor

from examples.kernel_cases.case import Case, near, seeded
from tilelang_ops.compressor import pool_groups
from tilelang_ops.compressor.pool_groups import reference

WIDTH, RING, RATIO = 512, 7, 2


def cases(small: bool = False) -> list[Case]:
    """The cases of this family."""
    sizes = ((8, 4), (48, 16)) if small else ((256, 4), (4096, 1024))
    return [_pool(*size) for size in sizes]


def _pool(rows: int, length: int) -> Case:
    num_seqs = rows // length

    def make(seed: int) -> tuple[Tensor, ...]:
        generator = seeded(seed)
        states = torch.randn(rows, 2, WIDTH, generator=generator)
        pool = torch.randn(num_seqs, RING, 2, WIDTH, generator=generator)
        within = torch.arange(length).repeat(num_seqs)
        positions = (within + 8).int()  # whole groups
        slots = torch.arange(num_seqs).repeat_interleave(length)
        ends = ((positions + 1) % RATIO == 0).nonzero().flatten()
        return states, pool, ends, positions, slots, within, length - 1 - within

    last = min(length, RING)  # rows of a sequence that its ring keeps

    def run(*args: Tensor) -> tuple[Tensor, Tensor]:
        return pool_groups(*args, RATIO, torch.bfloat16), args[1]

    def in_torch(
        states: Tensor, pool: Tensor, _: Tensor, positions: Tensor, slots: Tensor, *rest: Tensor
    ) -> tuple[Tensor, Tensor]:
        kept, position, slot = (
            x.unflatten(0, (num_seqs, length))[:, -last:] for x in (states, positions, slots)
        )
        pool[slot, position % RING] = kept
        groups = states.unflatten(0, (-1, RATIO))
        return (groups[:, :, 0].softmax(dim=1) * groups[:, :, 1]).sum(1).bfloat16(), pool

    def expected(*args: Tensor) -> tuple[Tensor, Tensor]:
        return reference.run(*args, RATIO, torch.bfloat16), args[1]

    kept = num_seqs * last
    return Case(
        op="compressor.pool_groups",
        size=f"{num_seqs} sequences of {length} rows",
        bytes=rows * 2 * WIDTH * 4 + rows // RATIO * WIDTH * 2 + kept * 2 * WIDTH * 8 + rows * 16,
        flops=0,
        make=make,
        run=run,
        torch=in_torch,
        check=near(expected, rtol=2.0**-7, atol=1e-5),
    )
