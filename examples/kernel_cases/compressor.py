"""Cases of the compressor's pooling."""

from __future__ import annotations

import torch
from torch import Tensor

from examples.kernel_cases.case import Case
from tilelang_ops.compressor import pool_groups

WIDTH, RING, RATIO = 512, 7, 2


def cases() -> list[Case]:
    """The cases of this family."""
    return [_pool(rows, length) for rows, length in ((256, 4), (4096, 1024))]


def _pool(rows: int, length: int) -> Case:
    num_seqs = rows // length

    def make(seed: int) -> tuple[Tensor, ...]:
        generator = torch.Generator("cuda").manual_seed(seed)
        states = torch.randn(rows, 2, WIDTH, generator=generator, device="cuda")
        pool = torch.randn(num_seqs, RING, 2, WIDTH, generator=generator, device="cuda")
        within = torch.arange(length, device="cuda").repeat(num_seqs)
        positions = (within + 8).int()  # whole groups
        slots = torch.arange(num_seqs, device="cuda").repeat_interleave(length)
        ends = ((positions + 1) % RATIO == 0).nonzero().flatten()
        return states, pool, ends, positions, slots, within, length - 1 - within

    def run(*args: Tensor) -> Tensor:
        return pool_groups(*args, RATIO, torch.bfloat16)

    def in_torch(states: Tensor, *rest: Tensor) -> Tensor:
        groups = states.unflatten(0, (-1, RATIO))
        return (groups[:, :, 0].softmax(dim=1) * groups[:, :, 1]).sum(1).bfloat16()

    kept = num_seqs * min(length, RING)
    return Case(
        op="compressor.pool_groups",
        size=f"{num_seqs} sequences of {length} rows",
        bytes=rows * 2 * WIDTH * 4 + rows // RATIO * WIDTH * 2 + kept * 2 * WIDTH * 8 + rows * 16,
        flops=0,
        make=make,
        run=run,
        torch=in_torch,
        check=lambda out, args: torch.testing.assert_close(
            out.float(), in_torch(*args).float(), rtol=2.0**-7, atol=1e-5
        ),
    )
