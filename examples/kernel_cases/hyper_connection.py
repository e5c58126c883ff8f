"""Cases of the residual streams."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from examples.kernel_cases.case import Case, Check, equal, near, returning, seeded
from tilelang_ops.common.numerics import encode_fp8
from tilelang_ops.common.packing import split_float32
from tilelang_ops.hyper_connection import (
    Advanced,
    advance_norm,
    advance_streams,
    collapse_streams,
    expand_streams,
    mean_streams,
    mix_coefficients,
    project_mix,
    start_streams,
)
from tilelang_ops.hyper_connection.advance_norm import reference as advance_norm_reference
from tilelang_ops.hyper_connection.advance_streams import reference as advance_streams_reference
from tilelang_ops.hyper_connection.mean_streams import reference as mean_reference
from tilelang_ops.hyper_connection.mix_coefficients import reference as mix_reference
from tilelang_ops.hyper_connection.project_mix import reference as project_mix_reference
from tilelang_ops.hyper_connection.start_streams import reference as start_reference

M, WIDTH = 4, 5120


def cases(small: bool = False) -> list[Case]:
    """The cases of this family."""
    kinds = (_start, _advance, _advance_norm, _expand, _collapse, _mean, _mix, _project_mix)
    return [kind(rows) for kind in kinds for rows in ((3,) if small else (256, 4096))]


def _make(rows: int, seed: int) -> tuple[Tensor, ...]:
    generator = seeded(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    streams, output = random(rows, M, WIDTH).bfloat16(), random(rows, WIDTH).bfloat16()
    return streams, random(rows, M).sigmoid(), output, random(rows, M).sigmoid(), random(rows, M, M).sigmoid()


def _mixed(streams: Tensor, output: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    mixed = torch.einsum("nij,niw->njw", comb, streams.float())
    return mixed + post.unsqueeze(-1) * output.float().unsqueeze(1)


def _case(
    op: str,
    rows: int,
    bytes: int,
    run: Callable[..., Any],
    in_torch: Callable[..., Any],
    check: Check,
) -> Case:
    return Case(
        op=f"hyper_connection.{op}",
        size=f"{rows} rows, {M} streams of {WIDTH}",
        bytes=bytes,
        flops=0,
        make=lambda seed: _make(rows, seed),
        run=run,
        torch=in_torch,
        check=check,
    )


def _close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual.float(), expected.float(), rtol=2.0**-7, atol=1e-4)


def _start(rows: int) -> Case:
    def make(seed: int) -> tuple[Tensor, Tensor, int, torch.dtype]:
        generator = seeded(seed)
        table = torch.randn(8 * rows, WIDTH, generator=generator).bfloat16()
        ids = torch.randint(0, 8 * rows, (rows,), generator=generator, dtype=torch.int32)
        return table, ids, M, torch.bfloat16

    return Case(
        op="hyper_connection.start_streams",
        size=f"{rows} rows, {M} streams of {WIDTH}",
        bytes=rows * (WIDTH * 2 * (M + 1) + 4 + 4 * M),
        flops=0,
        make=make,
        run=start_streams,
        torch=start_reference.run,
        check=equal(start_reference.run),
    )


def _advance(rows: int) -> Case:
    def in_torch(streams: Tensor, pre: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        new = _mixed(streams, *rest).bfloat16()
        wide = new.float()
        return new, (pre.unsqueeze(-1) * wide).sum(1).bfloat16(), wide.flatten(1).square().mean(-1)

    def check(out: tuple[Tensor, ...], args: tuple[Tensor, ...]) -> None:
        new, collapsed, mean_square = advance_streams_reference.run(*args)
        _close(out[0], new)  # a bit more or less in a stream shows in what is summed over them
        torch.testing.assert_close(out[1].float(), collapsed.float(), rtol=2.0**-6, atol=0.05)
        torch.testing.assert_close(out[2], mean_square, rtol=2.0**-6, atol=0.05)

    bytes = rows * WIDTH * 2 * (2 * M + 2) + rows * 100
    return _case("advance_streams", rows, bytes, advance_streams, in_torch, check)


def _advance_norm(rows: int) -> Case:
    def run(streams: Tensor, pre: Tensor, *pending: Tensor) -> Advanced:
        weight = streams.new_ones(WIDTH, dtype=torch.float32)
        return advance_norm(streams, pre, weight, 1e-6, *pending, encoding="codes")

    def in_torch(streams: Tensor, pre: Tensor, *pending: Tensor) -> Advanced:
        weight = streams.new_ones(WIDTH, dtype=torch.float32)
        return advance_norm_reference.run(streams, pre, weight, 1e-6, *pending, True, "codes")

    def check(out: Advanced, args: tuple[Tensor, ...]) -> None:
        expected = in_torch(*args)
        _close(out.streams, expected.streams)
        torch.testing.assert_close(out.mean_square, expected.mean_square, rtol=1e-3, atol=0)
        torch.testing.assert_close(out.values.float(), expected.values.float(), rtol=2.0**-6, atol=0.05)
        codes, scales = encode_fp8(out.values)
        assert torch.equal(codes, out.codes) and torch.equal(scales, out.scales)

    bytes = rows * WIDTH * (2 * (2 * M + 1) + 3) + rows * (WIDTH // 32 + 100)
    return _case("advance_norm", rows, bytes, run, in_torch, check)


def _expand(rows: int) -> Case:
    def run(streams: Tensor, pre: Tensor, *rest: Tensor) -> Tensor:
        return expand_streams(streams, *rest)

    def in_torch(streams: Tensor, pre: Tensor, *rest: Tensor) -> Tensor:
        return _mixed(streams, *rest).bfloat16()

    bytes = rows * WIDTH * 2 * (2 * M + 1) + rows * 80
    return _case("expand_streams", rows, bytes, run, in_torch, near(in_torch, rtol=2.0**-7, atol=1e-4))


def _collapse(rows: int) -> Case:
    def run(streams: Tensor, pre: Tensor, *rest: Tensor) -> Tensor:
        return collapse_streams(streams, pre)

    def in_torch(streams: Tensor, pre: Tensor, *rest: Tensor) -> Tensor:
        return (pre.unsqueeze(-1) * streams.float()).sum(1).bfloat16()

    bytes = rows * WIDTH * 2 * (M + 1)
    return _case("collapse_streams", rows, bytes, run, in_torch, near(in_torch, rtol=2.0**-7, atol=1e-4))


def _mean(rows: int) -> Case:
    """Into the features of three layers; this is the second."""

    def make(seed: int) -> tuple[Tensor, Tensor, int]:
        streams = _make(rows, seed)[0]
        return streams, torch.zeros(rows, 3 * WIDTH, dtype=torch.bfloat16), 1

    return Case(
        op="hyper_connection.mean_streams",
        size=f"{rows} rows, {M} streams of {WIDTH}",
        bytes=rows * WIDTH * 2 * (M + 1),
        flops=0,
        make=make,
        run=returning(1, mean_streams),
        torch=returning(1, mean_reference.run),
        check=near(returning(1, mean_reference.run), rtol=2.0**-7, atol=1e-4),
    )


def _mix(rows: int) -> Case:
    def make(seed: int) -> tuple[Tensor, ...]:
        generator = seeded(seed)
        projection = torch.randn(rows, 24, generator=generator)
        square = torch.rand(rows, generator=generator)
        return projection, square, *torch.randn(2, 24, generator=generator)

    def run(*args: Tensor) -> tuple[Tensor, ...]:
        return mix_coefficients(*args, num_streams=M, num_rounds=20, eps=1e-6, norm_eps=1e-6)

    def in_torch(*args: Tensor) -> tuple[Tensor, ...]:
        return mix_reference.run(*args, M, 20, 1e-6, 1e-6)

    return Case(
        op="hyper_connection.mix_coefficients",
        size=f"{rows} rows, 20 rounds",
        bytes=rows * 4 * (24 + 1 + 24),
        flops=0,
        make=make,
        run=run,
        torch=in_torch,
        check=near(in_torch, rtol=1e-4, atol=1e-6),
    )


def _project_mix(rows: int) -> Case:
    """With a matrix in float32, which is three parts in bfloat16."""
    parts, columns = 3, (2 + M) * M
    numbers = {"num_rounds": 20, "eps": 1e-6, "norm_eps": 1e-6}

    def make(seed: int) -> tuple[Tensor, ...]:
        generator = seeded(seed)
        streams = torch.randn(rows, M, WIDTH, generator=generator).bfloat16()
        weight = torch.randn(columns, M * WIDTH, generator=generator) / 100
        mean_square = streams.float().flatten(1).square().mean(-1)
        return (
            streams,
            split_float32(weight),
            mean_square,
            *torch.randn(2, columns, generator=generator),
            weight,
        )

    def in_torch(
        streams: Tensor, _: Tensor, mean_square: Tensor, scale: Tensor, base: Tensor, weight: Tensor
    ) -> tuple[Tensor, ...]:
        projection = streams.flatten(1).float() @ weight.T
        return mix_reference.run(projection, mean_square, scale, base, M, *numbers.values())

    return Case(
        op="hyper_connection.project_mix",
        size=f"{rows} rows, {M * WIDTH} to {columns}, float32 weights, 20 rounds",
        bytes=2 * M * WIDTH * (rows + parts * columns) + rows * 4 * (1 + columns),
        flops=2 * rows * columns * M * WIDTH * parts,
        make=make,
        run=lambda *args: project_mix(*args[:5], num_parts=parts, **numbers),
        torch=in_torch,
        check=near(
            lambda *args: project_mix_reference.run(*args[:5], parts, *numbers.values()), rtol=1e-3, atol=1e-5
        ),
    )
