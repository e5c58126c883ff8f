"""Cases of the norms."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from examples.kernel_cases.case import Case
from tilelang_ops.common.numerics import encode_fp8
from tilelang_ops.norm import Normed, norm_quantize, rms_norm

EPS = 1e-6


def cases() -> list[Case]:
    """The cases of this family."""
    sizes = [(rows, width) for rows in (256, 4096) for width in (5120, 1280, 512)]
    return [_norm(*size) for size in sizes] + [
        _quantize(rows, keeps) for rows in (256, 4096) for keeps in (0, 1)
    ]


def _make(rows: int, width: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(rows, width, generator=generator, device="cuda").bfloat16()
    return x, torch.rand(width, generator=generator, device="cuda") + 0.5


def _in_torch(x: Tensor, weight: Tensor) -> Tensor:
    return torch.nn.functional.rms_norm(x, x.shape[1:], weight.to(x.dtype), EPS)


def _check(out: Tensor, args: tuple[Tensor, Tensor]) -> None:
    x, weight = args[0].double(), args[1].double()
    expected = x / torch.sqrt(x.square().mean(1, keepdim=True) + EPS) * weight
    torch.testing.assert_close(out.double(), expected, rtol=2.0**-8, atol=1e-6)


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
    )


def _quantize(rows: int, keeps: int) -> Case:
    width = 5120

    def check(out: Normed, args: tuple[Any, ...]) -> None:
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
        run=lambda x, weight: norm_quantize(x, weight, EPS, keeps_values=bool(keeps)),
        torch=None,
        check=check,
    )
