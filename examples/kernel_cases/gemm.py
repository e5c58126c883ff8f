"""Cases of the matrix products. The work in torch has its weights decoded to bfloat16 beforehand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from examples.kernel_cases.case import FP8_RATE, Case, Check, seeded
from tilelang_ops.common.dense_packing import pack_units, unpack_units
from tilelang_ops.common.packing import pack_fp8, pack_mxfp4, split_float32, unpack_fp8, unpack_mxfp4
from tilelang_ops.common.row_codes import RowCodes
from tilelang_ops.gemm import (
    grouped_linear_mxfp4,
    grouped_swiglu_mxfp4,
    linear,
    linear_fp8,
    linear_w8a8,
)

# Experts of a device, and rows of each: decode of few and of 64 requests, with and without drafts; prefill.
EXPERTS = ((7, 7), (7, 55), (7, 219), (7, 512), (96, 256))
DENSE = ((1792, 5120, 1), (32768, 1280, 1), (5120, 8192, 1), (4608, 5120, 1), (1024, 4096, 8))


def cases(small: bool = False) -> list[Case]:
    """The cases of this family."""
    if small:
        hidden, inner, vocab, rows, groups = 128, 64, 200, (3,), ((7, 3),)
        dense_shapes: tuple[tuple[int, int, int], ...] = ((128, 64, 1), (64, 128, 3))
    else:
        hidden, inner, vocab, rows, groups = 5120, 2304, 129280, (32, 256, 1024, 4096), EXPERTS
        dense_shapes = DENSE
    dense = [make(n, *shape) for n in rows for shape in dense_shapes for make in (_fp8, _w8a8)]
    experts = [make(*group, hidden, inner) for group in groups for make in (_first, _second)]
    head = [_linear(n, vocab, hidden, 1) for n in (64, 256, 1536)]
    router = [_linear(256, 384, hidden, 1), _linear(256, 1024, hidden, 1)]
    return dense + experts + head + router + [_linear(256, 24, 4 * hidden, 3)]


def _rows(num_rows: int, width: int, generator: torch.Generator) -> Tensor:
    return torch.randn(num_rows, width, generator=generator).bfloat16()


def _bytes(*shape: int, generator: torch.Generator) -> Tensor:
    return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)


def _close(meaning: Callable[..., Tensor]) -> Check:
    """Close to the operator's meaning, with the sums of any order."""

    def check(out: Tensor, args: tuple[Any, ...]) -> None:
        exact = meaning(*args).float()
        torch.testing.assert_close(out.float(), exact, rtol=2.0**-6, atol=float(exact.std()) * 2.0**-7)

    return check


def _fp8(rows: int, columns: int, width: int, groups: int) -> Case:
    def make(seed: int) -> tuple[Tensor, Tensor, Tensor]:
        generator = seeded(seed)
        codes = _bytes(groups, columns, width, generator=generator)
        codes[(codes & 0x7F) == 0x7F] = 0
        scales = torch.full((groups, columns // 32, width // 32), 118, dtype=torch.uint8)
        packed = pack_fp8(codes, scales)
        return _rows(rows, groups * width, generator), packed, unpack_fp8(packed).bfloat16()

    def in_torch(x: Tensor, _: Tensor, weight: Tensor) -> Tensor:
        parts = x.view(rows, groups, width).transpose(0, 1) @ weight.transpose(1, 2)
        return parts.transpose(0, 1).reshape(rows, groups * columns)

    return Case(
        op="gemm.linear_fp8",
        size=f"{rows} rows, {f'{groups} x ' if groups > 1 else ''}{width} to {columns}",
        bytes=groups * (columns * width + columns * width // 1024 + 2 * rows * (columns + width)),
        flops=2 * rows * columns * width * groups,
        make=make,
        run=lambda x, packed, _: linear_fp8(x, packed, columns, num_groups=groups),
        torch=in_torch,
        check=_close(in_torch),
    )


def _w8a8(rows: int, columns: int, width: int, groups: int) -> Case:
    def make(seed: int) -> tuple[Tensor, ...]:
        generator = seeded(seed)
        codes = _bytes(groups, columns, width, generator=generator)
        codes[(codes & 0x7F) == 0x7F] = 0
        packed = pack_units(codes, torch.full((groups, columns // 32, width // 32), 118, dtype=torch.uint8))
        x = RowCodes.encode(_rows(rows, groups * width, generator))
        return x.codes, x.scales, *packed, x.values(), unpack_units(*packed).bfloat16()

    def in_torch(*args: Tensor) -> Tensor:
        x, weight = args[-2:]
        parts = x.view(rows, groups, width).transpose(0, 1) @ weight.transpose(1, 2)
        return parts.transpose(0, 1).reshape(rows, groups * columns)

    return Case(
        op="gemm.linear_w8a8",
        size=f"{rows} rows, {f'{groups} x ' if groups > 1 else ''}{width} to {columns}",
        bytes=groups
        * (columns * width + columns * width // 1024 + rows * (width + width // 32 + 2 * columns)),
        flops=2 * rows * columns * width * groups,
        make=make,
        run=lambda *args: linear_w8a8(*args[:4], num_groups=groups),
        torch=in_torch,
        check=_close(in_torch),
        rate=FP8_RATE,
    )


def _experts(experts: int, rows: int, columns: int, width: int, gated: bool, seed: int) -> tuple[Tensor, ...]:
    """Arguments of both products; of many experts some have equal weights, each in memory of its own."""
    generator = seeded(seed)
    different = 8 if experts % 8 == 0 else experts
    codes = _bytes(different, columns, width // 2, generator=generator)
    scales = torch.full((different, columns, width // 32), 120, dtype=torch.uint8)
    packed = pack_mxfp4(codes, scales, gated=gated)
    weights = unpack_mxfp4(packed, gated=gated).bfloat16()
    packed, weights = (t.repeat(experts // different, *[1] * (t.ndim - 1)) for t in (packed, weights))
    offsets = torch.arange(experts + 1, dtype=torch.int32) * rows
    factors = torch.rand(experts * rows, generator=generator)
    return _rows(experts * rows, width, generator), packed, offsets, factors, weights


def _product(x: Tensor, offsets: Tensor, weights: Tensor) -> Tensor:
    return torch._grouped_mm(x, weights.transpose(1, 2), offs=offsets[1:])


def _expert_bytes(experts: int, columns: int, width: int) -> int:
    return experts * (columns * width // 2 + columns * width // 32)


def _first(experts: int, rows: int, hidden: int, inner: int) -> Case:
    def in_torch(x: Tensor, _: Tensor, offsets: Tensor, factors: Tensor, weights: Tensor) -> Tensor:
        gate, up = _product(x, offsets, weights).float().chunk(2, 1)
        gate, up = gate.clamp(max=10.0), up.clamp(-10.0, 10.0)
        return (torch.nn.functional.silu(gate) * up * factors.unsqueeze(1)).bfloat16()

    return Case(
        op="gemm.grouped_swiglu_mxfp4",
        size=f"{experts} experts x {rows} rows, {hidden} to 2 x {inner}",
        bytes=_expert_bytes(experts, 2 * inner, hidden) + 2 * experts * rows * (hidden + inner),
        flops=2 * experts * rows * 2 * inner * hidden,
        make=lambda seed: _experts(experts, rows, 2 * inner, hidden, True, seed),
        run=lambda x, packed, offsets, factors, _: grouped_swiglu_mxfp4(
            x, packed, offsets, factors, 10.0, inner, round_output=False
        ),
        torch=in_torch,
        check=_close(in_torch),
    )


def _second(experts: int, rows: int, hidden: int, inner: int) -> Case:
    def in_torch(x: Tensor, _: Tensor, offsets: Tensor, __: Tensor, weights: Tensor) -> Tensor:
        return _product(x, offsets, weights)

    return Case(
        op="gemm.grouped_linear_mxfp4",
        size=f"{experts} experts x {rows} rows, {inner} to {hidden}",
        bytes=_expert_bytes(experts, hidden, inner) + 2 * experts * rows * (hidden + inner),
        flops=2 * experts * rows * inner * hidden,
        make=lambda seed: _experts(experts, rows, hidden, inner, False, seed),
        run=lambda x, packed, offsets, _, __: grouped_linear_mxfp4(x, packed, offsets, hidden),
        torch=in_torch,
        check=_close(in_torch),
    )


def _linear(rows: int, columns: int, width: int, parts: int) -> Case:
    def make(seed: int) -> tuple[Tensor, Tensor, Tensor]:
        generator = seeded(seed)
        weight = torch.randn(columns, width, generator=generator) / 64
        return (
            _rows(rows, width, generator),
            split_float32(weight) if parts > 1 else weight.bfloat16(),
            weight,
        )

    def in_torch(x: Tensor, packed: Tensor, weight: Tensor) -> Tensor:
        return x.float() @ weight.T if parts > 1 else (x @ packed.T).float()

    return Case(
        op="gemm.linear",
        size=f"{rows} rows, {width} to {columns}{', float32 weights' if parts > 1 else ''}",
        bytes=2 * parts * columns * width + 2 * rows * width + 4 * rows * columns,
        flops=2 * rows * columns * width * parts,
        make=make,
        run=lambda x, packed, _: linear(x, packed, torch.float32, num_parts=parts),
        torch=in_torch,
        check=_close(in_torch),
    )
