"""Cases of the expert operators without matrix products."""

from __future__ import annotations

import torch
from torch import Tensor

from examples.kernel_cases.case import Case
from tilelang_ops.moe import swiglu

WIDTH = 2304


def cases() -> list[Case]:
    """The cases of this family."""
    return [_swiglu(rows) for rows in (256, 4096)]


def _swiglu(rows: int) -> Case:
    def make(seed: int) -> tuple[Tensor]:
        generator = torch.Generator("cuda").manual_seed(seed)
        return (torch.randn(rows, 2 * WIDTH, generator=generator, device="cuda").bfloat16(),)

    def in_torch(x: Tensor) -> Tensor:
        gate, up = x.chunk(2, 1)
        return torch.nn.functional.silu(gate.clamp(max=10.0)) * up.clamp(-10.0, 10.0)

    return Case(
        op="moe.swiglu",
        size=f"{rows} rows, {WIDTH} channels",
        bytes=rows * WIDTH * 3 * 2,
        flops=0,
        make=make,
        run=lambda x: swiglu(x, 10.0, torch.bfloat16),
        torch=in_torch,
        check=lambda out, args: torch.testing.assert_close(
            out.float(), in_torch(args[0].float()), rtol=2.0**-7, atol=1e-5
        ),
    )
