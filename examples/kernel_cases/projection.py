"""Cases of rotation and row encodings."""

from __future__ import annotations

import torch
from torch import Tensor

from examples.kernel_cases.case import Case
from tilelang_ops.common.numerics import encode_fp8
from tilelang_ops.projection import EncodedRows, Norm, Records, Rotation, encode_rows, rotate

PAIRS = 32


def cases() -> list[Case]:
    """The cases of this family."""
    return [
        *(_rotate(rows, heads, width) for rows in (256, 4096) for heads, width in ((64, 512), (32, 128))),
        *(_quantize(rows, width) for rows in (256, 4096) for width in (5120, 8192)),
        *(_attention_output(rows) for rows in (256, 4096)),
        *(_index_queries(rows) for rows in (256, 4096)),
        *(_store(rows, *kind) for rows in (256, 4096) for kind in (("fp8", 512, 528), ("fp4", 512, 288))),
    ]


def _angles(rows: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    angles = 100 * torch.rand(rows, PAIRS, generator=generator, device="cuda")
    return angles.cos(), angles.sin()


def _rotate(rows: int, heads: int, width: int) -> Case:
    def make(seed: int) -> tuple[Tensor, ...]:
        generator = torch.Generator("cuda").manual_seed(seed)
        x = torch.randn(rows, heads, width, generator=generator, device="cuda").bfloat16()
        return x, *_angles(rows, generator)

    def in_torch(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        tail = x[..., width - 2 * PAIRS :].float().unflatten(-1, (PAIRS, 2))
        a, b = tail.unbind(-1)
        c, s = cos[:, None], sin[:, None]
        return torch.stack([a * c - b * s, a * s + b * c], -1).flatten(-2)

    def check(out: Tensor, args: tuple[Tensor, ...]) -> None:
        fresh = make(0)
        torch.testing.assert_close(
            out[..., width - 2 * PAIRS :].float(), in_torch(*fresh), rtol=2.0**-8, atol=1e-5
        )

    return Case(
        op="projection.rotate",
        size=f"{rows} rows, {heads} heads, 64 of {width} channels",
        bytes=rows * heads * 2 * PAIRS * 4 + rows * PAIRS * 8,
        flops=0,
        make=make,
        run=rotate,
        torch=in_torch,
        check=check,
    )


def _quantize(rows: int, width: int) -> Case:
    def make(seed: int) -> tuple[Tensor]:
        generator = torch.Generator("cuda").manual_seed(seed)
        return (torch.randn(rows, width, generator=generator, device="cuda").bfloat16(),)

    def check(out: EncodedRows, args: tuple[Tensor]) -> None:
        codes, scales = encode_fp8(args[0])
        assert torch.equal(codes, out.codes) and torch.equal(scales, out.scales)

    return Case(
        op="projection.encode_rows",
        size=f"{rows} rows, {width} channels to FP8",
        bytes=rows * width * 3 + rows * width // 32,
        flops=0,
        make=make,
        run=lambda x: encode_rows(x, "fp8"),
        torch=encode_fp8,
        check=check,
    )


def _attention_output(rows: int) -> Case:
    heads, width = 64, 512

    def make(seed: int) -> tuple[Tensor, Rotation]:
        generator = torch.Generator("cuda").manual_seed(seed)
        x = torch.randn(rows, heads, width, generator=generator, device="cuda").bfloat16()
        return x, Rotation(*_angles(rows, generator), inverse=True)

    def check(out: EncodedRows, args: tuple[Tensor, Rotation]) -> None:
        codes, scales = encode_fp8(args[0][..., : width - 64])
        assert torch.equal(codes, out.codes[..., : width - 64])
        assert torch.equal(scales, out.scales[..., :14])

    return Case(
        op="projection.encode_rows",
        size=f"{rows} rows, 64 heads of 512 rotated back to FP8",
        bytes=rows * heads * (width * 3 + width // 32) + rows * PAIRS * 8,
        flops=0,
        make=make,
        run=lambda x, rotation: encode_rows(x, "fp8", rotation=rotation),
        torch=None,
        check=check,
    )


def _index_queries(rows: int) -> Case:
    heads, width = 32, 128

    def make(seed: int) -> tuple[Tensor, Rotation]:
        generator = torch.Generator("cuda").manual_seed(seed)
        x = torch.randn(rows, heads, width, generator=generator, device="cuda").bfloat16()
        return x, Rotation(*_angles(rows, generator))

    return Case(
        op="projection.encode_rows",
        size=f"{rows} rows, 32 heads of 128 rotated to MXFP4",
        bytes=rows * heads * (width * 2 + width // 2 + width // 32) + rows * PAIRS * 8,
        flops=0,
        make=make,
        run=lambda x, rotation: encode_rows(x, "mxfp4", rotation=rotation),
        torch=None,
        check=lambda out, args: None,
    )


def _store(rows: int, format: str, width: int, fields: int) -> Case:
    def make(seed: int) -> tuple[Tensor, Norm, Rotation, Records]:
        generator = torch.Generator("cuda").manual_seed(seed)
        x = torch.randn(rows, width, generator=generator, device="cuda").bfloat16()
        pool = torch.zeros(64, 134, fields, dtype=torch.uint8, device="cuda")
        index = torch.randperm(64 * 134, generator=generator, device="cuda")[:rows]
        norm = Norm(torch.rand(width, generator=generator, device="cuda"), 1e-6)
        return x, norm, Rotation(*_angles(rows, generator)), Records(pool, None, index)

    return Case(
        op="projection.encode_rows",
        size=f"{rows} rows, norm, rotation, {format.upper()} records",
        bytes=rows * (width * 2 + fields + PAIRS * 8 + 8),
        flops=0,
        make=make,
        run=lambda x, norm, rotation, records: encode_rows(
            x, format, norm=norm, rotation=rotation, records=records
        ),
        torch=None,
        check=lambda out, args: None,
    )
