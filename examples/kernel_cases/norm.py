"""Cases of the norms."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from examples.kernel_cases.case import Case, alike, near, seeded
from tilelang_ops.common.numerics import encode_fp8
from tilelang_ops.norm import Normed, norm_quantize, rms_norm
from tilelang_ops.norm.norm_quantize import reference as quantize_reference

EPS = 1e-6


def cases(small: bool = False) -> list[Case]:
    """The cases of this family."""
    sizes = (3,) if small else (256, 4096)
    plain = [_norm(rows, width) for rows in sizes for width in (5120, 1280, 512)]
    return plain + [_quantize(rows, keeps) for rows in sizes for keeps in (False, True)]


def _make(rows: int, width: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = seeded(seed)
    x = torch.randn(rows, width, generator=generator).bfloat16()
    return x, torch.rand(width, generator=generator) + 0.5


def _in_torch(x: Tensor, weight: Tensor) -> Tensor:
    return torch.nn.functional.rms_norm(x, x.shape[1:], weight.to(x.dtype), EPS)


def _exact(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.double()
    return wide / torch.sqrt(wide.square().mean(1, keepdim=True) + EPS) * weight.double()


_check = near(_exact, rtol=2.0**-8, atol=1e-6)


def _norm(rows: int, width: int) -> Case:
    return Case(
        op="norm.rms_norm",
        size=f"{rows} rows, {width} channels",
        bytes=rows * width * 4,
        flops=0,
        make=lambda seed: _make(rows, width, seed),
        run=lambda x, weight: rms_norm(x, weight, EPS),
        torch=_in_torch,
        check=_check,
        check_torch=near(_exact, rtol=3 * 2.0**-8, atol=1e-6),  # weights are rounded to bfloat16
    )


def _quantize(rows: int, keeps: bool) -> Case:
    width = 5120

    def in_torch(x: Tensor, weight: Tensor) -> Normed:
        return quantize_reference.run(x, weight, EPS, None, keeps)

    def check(out: Normed, args: tuple[Any, ...]) -> None:
        alike(in_torch, share=1e-3)(out, args)
        if out.values is not None:
            _check(out.values, args)
            codes, scales = encode_fp8(out.values)
            assert torch.equal(codes, out.codes) and torch.equal(scales, out.scales)

    return Case(
        op="norm.norm_quantize",
        size=f"{rows} rows, {width} channels, {'FP8 and bfloat16' if keeps else 'FP8'}",
        bytes=rows * width * (3 + 2 * keeps) + rows * width // 32,
        flops=0,
        make=lambda seed: _make(rows, width, seed),
        run=lambda x, weight: norm_quantize(x, weight, EPS, keeps_values=keeps),
        torch=in_torch,
        check=check,
    )
