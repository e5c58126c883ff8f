"""Cases of rotation and row encodings."""

from __future__ import annotations

import torch
from torch import Tensor

from examples.kernel_cases.case import Case, alike, equal, near, seeded
from tilelang_ops.common.numerics import encode_fp8
from tilelang_ops.common.records import flat_rows, row_numbers
from tilelang_ops.projection import (
    EncodedRows,
    Norm,
    Records,
    Rotation,
    encode_rows,
    encode_units,
    rotate,
    round_rows,
)
from tilelang_ops.projection.encode_rows import reference as encode_reference
from tilelang_ops.projection.encode_units import reference as units_reference
from tilelang_ops.projection.rotate import reference as rotate_reference
from tilelang_ops.projection.round_rows import reference as round_reference

PAIRS = 32


def cases(small: bool = False) -> list[Case]:
    """The cases of this family."""
    sizes = (3,) if small else (256, 4096)
    return [
        *(_rotate(rows, heads, width) for rows in sizes for heads, width in ((64, 512), (32, 128))),
        *(_quantize(rows, width) for rows in sizes for width in (5120, 8192)),
        *(_attention_output(rows) for rows in sizes),
        *(_index_queries(rows) for rows in sizes),
        *(
            _round(rows, *kind)
            for rows in sizes
            for kind in (("fp8", 64, 512, True), ("mxfp4", 32, 128, False))
        ),
        *(_encode_units(rows, heads) for rows in sizes for heads in (1, 64)),
        *(_store(rows, *kind) for rows in sizes for kind in (("fp8", 512, 528), ("fp4", 512, 288))),
    ]


def _angles(rows: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    angles = 100 * torch.rand(rows, PAIRS, generator=generator)
    return angles.cos(), angles.sin()


def _rotate(rows: int, heads: int, width: int) -> Case:
    def make(seed: int) -> tuple[Tensor, ...]:
        generator = seeded(seed)
        x = torch.randn(rows, heads, width, generator=generator).bfloat16()
        return x, *_angles(rows, generator)

    def in_torch(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        tail = x[..., width - 2 * PAIRS :].unflatten(-1, (PAIRS, 2))
        a, b = tail.float().unbind(-1)
        c, s = cos[:, None], sin[:, None]
        tail.copy_(torch.stack([a * c - b * s, a * s + b * c], -1))
        return x

    return Case(
        op="projection.rotate",
        size=f"{rows} rows, {heads} heads, 64 of {width} channels",
        bytes=rows * heads * 2 * PAIRS * 4 + rows * PAIRS * 8,
        flops=0,
        make=make,
        run=rotate,
        torch=in_torch,
        check=near(_rotated, rtol=2.0**-8, atol=1e-5),
        # one step of bfloat16: torch may contract a product, which is then rounded the other way
        check_torch=near(_rotated, rtol=2.0**-7, atol=1e-5),
    )


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    rotate_reference.run(x, cos, sin, False)
    return x


def _quantize(rows: int, width: int) -> Case:
    def make(seed: int) -> tuple[Tensor]:
        generator = seeded(seed)
        return (torch.randn(rows, width, generator=generator).bfloat16(),)

    return Case(
        op="projection.encode_rows",
        size=f"{rows} rows, {width} channels to FP8",
        bytes=rows * width * 3 + rows * width // 32,
        flops=0,
        make=make,
        run=lambda x: encode_rows(x, "fp8"),
        torch=encode_fp8,
        check=equal(encode_fp8),
    )


def _attention_output(rows: int) -> Case:
    heads, width = 64, 512

    def make(seed: int) -> tuple[Tensor, Rotation]:
        generator = seeded(seed)
        x = torch.randn(rows, heads, width, generator=generator).bfloat16()
        return x, Rotation(*_angles(rows, generator), inverse=True)

    def in_torch(x: Tensor, rotation: Rotation) -> EncodedRows:
        return encode_reference.run(x, "fp8", None, rotation, None, False)

    return Case(
        op="projection.encode_rows",
        size=f"{rows} rows, 64 heads of 512 rotated back to FP8",
        bytes=rows * heads * (width * 3 + width // 32) + rows * PAIRS * 8,
        flops=0,
        make=make,
        run=lambda x, rotation: encode_rows(x, "fp8", rotation=rotation),
        torch=in_torch,
        check=alike(in_torch, share=1e-3),
    )


def _index_queries(rows: int) -> Case:
    heads, width = 32, 128

    def make(seed: int) -> tuple[Tensor, Rotation]:
        generator = seeded(seed)
        x = torch.randn(rows, heads, width, generator=generator).bfloat16()
        return x, Rotation(*_angles(rows, generator))

    def in_torch(x: Tensor, rotation: Rotation) -> EncodedRows:
        return encode_reference.run(x, "mxfp4", None, rotation, None, False)

    return Case(
        op="projection.encode_rows",
        size=f"{rows} rows, 32 heads of 128 rotated to MXFP4",
        bytes=rows * heads * (width * 2 + width // 2 + width // 32) + rows * PAIRS * 8,
        flops=0,
        make=make,
        run=lambda x, rotation: encode_rows(x, "mxfp4", rotation=rotation),
        torch=in_torch,
        check=alike(in_torch, share=1e-3),
    )


def _round(rows: int, format: str, heads: int, width: int, inverse: bool) -> Case:
    def make(seed: int) -> tuple[Tensor, str, Rotation]:
        generator = seeded(seed)
        x = torch.randn(rows, heads, width, generator=generator).bfloat16()
        return x, format, Rotation(*_angles(rows, generator), inverse=inverse)

    return Case(
        op="projection.round_rows",
        size=f"{rows} rows, {heads} heads of {width} rotated{' back' * inverse}, values of {format.upper()}",
        bytes=rows * (heads * width * 4 + PAIRS * 8),
        flops=0,
        make=make,
        run=lambda x, format, rotation: round_rows(x, format, rotation=rotation),
        torch=round_reference.run,
        check=alike(round_reference.run, share=1e-3),
    )


def _encode_units(rows: int, heads: int) -> Case:
    """Of one vector a row as it is, of several rotated back."""
    width = 512 if heads > 1 else 8192

    def make(seed: int) -> tuple[Tensor, Rotation | None]:
        generator = seeded(seed)
        x = torch.randn(rows, heads, width, generator=generator).bfloat16()
        return x, Rotation(*_angles(rows, generator), inverse=True) if heads > 1 else None

    def in_torch(x: Tensor, rotation: Rotation | None) -> tuple[Tensor, Tensor]:
        out = units_reference.run(x, rotation)
        return out.codes, out.scales[:, :rows]

    def run(x: Tensor, rotation: Rotation | None) -> tuple[Tensor, Tensor]:
        out = encode_units(x, rotation=rotation)
        return out.codes, out.scales[:, :rows]

    return Case(
        op="projection.encode_units",
        size=f"{rows} rows, "
        + (f"{heads} heads of {width} rotated back" if heads > 1 else f"{width} channels"),
        bytes=rows * heads * (width * 3 + width // 32) + rows * PAIRS * 8 * (heads > 1),
        flops=0,
        make=make,
        run=run,
        torch=in_torch,
        check=alike(in_torch, share=1e-3),
    )


def _store(rows: int, format: str, width: int, fields: int) -> Case:
    def make(seed: int) -> tuple[Tensor, Norm, Rotation, Records]:
        generator = seeded(seed)
        x = torch.randn(rows, width, generator=generator).bfloat16()
        pool = torch.zeros(64, 134, fields, dtype=torch.uint8)
        index = torch.randperm(64 * 134, generator=generator)[:rows]
        norm = Norm(torch.rand(width, generator=generator), 1e-6)
        return x, norm, Rotation(*_angles(rows, generator)), Records(pool, None, index)

    def run(x: Tensor, norm: Norm, rotation: Rotation, records: Records) -> Tensor:
        encode_rows(x, format, norm=norm, rotation=rotation, records=records)
        return records.codes

    def expected(x: Tensor, norm: Norm, rotation: Rotation, records: Records) -> Tensor:
        encode_reference.run(x, format, norm, rotation, records, False)
        return records.codes

    def in_torch(x: Tensor, norm: Norm, rotation: Rotation, records: Records) -> Tensor:
        encoded = encode_reference.run(x, format, norm, rotation, None, False)
        rows = row_numbers(records.codes, records.index)
        flat_rows(records.codes).index_copy_(0, rows, torch.cat([encoded.codes, encoded.scales], 1))
        return records.codes

    return Case(
        op="projection.encode_rows",
        size=f"{rows} rows, norm, rotation, {format.upper()} records",
        bytes=rows * (width * 2 + fields + PAIRS * 8 + 8),
        flops=0,
        make=make,
        run=run,
        torch=in_torch,
        check=alike(expected, share=1e-3),
    )
