"""Cases of the residual streams."""

from __future__ import annotations

import torch
from torch import Tensor

from examples.kernel_cases.case import Case
from tilelang_ops.common.numerics import encode_fp8
from tilelang_ops.hyper_connection import (
    Advanced,
    advance_norm,
    advance_streams,
    collapse_streams,
    expand_streams,
    mean_streams,
    mix_coefficients,
)

M, WIDTH = 4, 5120


def cases() -> list[Case]:
    """The cases of this family."""
    kinds = (_advance, _advance_norm, _expand, _collapse, _mean, _mix)
    return [kind(rows) for kind in kinds for rows in (256, 4096)]


def _make(rows: int, seed: int) -> tuple[Tensor, ...]:
    generator = torch.Generator("cuda").manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device="cuda")

    streams, output = random(rows, M, WIDTH).bfloat16(), random(rows, WIDTH).bfloat16()
    return streams, random(rows, M).sigmoid(), output, random(rows, M).sigmoid(), random(rows, M, M).sigmoid()


def _mixed(streams: Tensor, output: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    mixed = torch.einsum("nij,niw->njw", comb, streams.float())
    return mixed + post.unsqueeze(-1) * output.float().unsqueeze(1)


def _case(op: str, rows: int, bytes: int, run: object, in_torch: object, check: object) -> Case:
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


def _advance(rows: int) -> Case:
    def in_torch(streams: Tensor, pre: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        new = _mixed(streams, *rest).bfloat16()
        wide = new.float()
        return new, (pre.unsqueeze(-1) * wide).sum(1).bfloat16(), wide.flatten(1).square().mean(-1)

    def check(out: tuple[Tensor, ...], args: tuple[Tensor, ...]) -> None:
        for actual, expected in zip(out, in_torch(*args), strict=True):
            _close(actual, expected) if actual.dim() == 3 else torch.testing.assert_close(
                actual.float(), expected.float(), rtol=2.0**-6, atol=0.05
            )

    bytes = rows * WIDTH * 2 * (2 * M + 2) + rows * 100
    return _case("advance_streams", rows, bytes, advance_streams, in_torch, check)


def _advance_norm(rows: int) -> Case:
    weight = torch.ones(WIDTH, device="cuda")

    def run(streams: Tensor, pre: Tensor, *pending: Tensor) -> Advanced:
        return advance_norm(streams, pre, weight, 1e-6, *pending, quantizes=True)

    def check(out: Advanced, args: tuple[Tensor, ...]) -> None:
        streams, collapsed, _ = advance_streams(*args)
        assert torch.equal(out.streams, streams)
        expected = torch.nn.functional.rms_norm(collapsed.float(), (WIDTH,), weight, 1e-6)
        _close(out.values, expected)
        codes, scales = encode_fp8(out.values)
        assert torch.equal(codes, out.codes) and torch.equal(scales, out.scales)

    bytes = rows * WIDTH * (2 * (2 * M + 1) + 3) + rows * (WIDTH // 32 + 100)
    return _case("advance_norm", rows, bytes, run, None, check)


def _expand(rows: int) -> Case:
    def run(streams: Tensor, pre: Tensor, *rest: Tensor) -> Tensor:
        return expand_streams(streams, *rest)

    def in_torch(streams: Tensor, pre: Tensor, *rest: Tensor) -> Tensor:
        return _mixed(streams, *rest).bfloat16()

    bytes = rows * WIDTH * 2 * (2 * M + 1) + rows * 80
    return _case("expand_streams", rows, bytes, run, in_torch, lambda o, a: _close(o, in_torch(*a)))


def _collapse(rows: int) -> Case:
    def run(streams: Tensor, pre: Tensor, *rest: Tensor) -> Tensor:
        return collapse_streams(streams, pre)

    def in_torch(streams: Tensor, pre: Tensor, *rest: Tensor) -> Tensor:
        return (pre.unsqueeze(-1) * streams.float()).sum(1).bfloat16()

    bytes = rows * WIDTH * 2 * (M + 1)
    return _case("collapse_streams", rows, bytes, run, in_torch, lambda o, a: _close(o, in_torch(*a)))


def _mean(rows: int) -> Case:
    features = torch.empty(rows, 3 * WIDTH, dtype=torch.bfloat16, device="cuda")

    def run(streams: Tensor, *rest: Tensor) -> Tensor:
        mean_streams(streams, features, 1)
        return features[:, WIDTH : 2 * WIDTH]

    def in_torch(streams: Tensor, *rest: Tensor) -> Tensor:
        return streams.float().mean(1).bfloat16()

    bytes = rows * WIDTH * 2 * (M + 1)
    return _case("mean_streams", rows, bytes, run, in_torch, lambda o, a: _close(o, in_torch(*a)))


def _mix(rows: int) -> Case:
    def make(seed: int) -> tuple[Tensor, ...]:
        generator = torch.Generator("cuda").manual_seed(seed)
        projection = torch.randn(rows, 24, generator=generator, device="cuda")
        square = torch.rand(rows, generator=generator, device="cuda")
        return projection, square, *torch.randn(2, 24, generator=generator, device="cuda")

    def run(*args: Tensor) -> tuple[Tensor, ...]:
        return mix_coefficients(*args, num_streams=M, num_rounds=20, eps=1e-6, norm_eps=1e-6)

    def check(out: tuple[Tensor, ...], args: tuple[Tensor, ...]) -> None:
        expected = mix_coefficients(
            *(a.cpu() for a in args), num_streams=M, num_rounds=20, eps=1e-6, norm_eps=1e-6
        )
        for a, b in zip(out, expected, strict=True):
            torch.testing.assert_close(a.cpu(), b, rtol=1e-4, atol=1e-6)

    return Case(
        op="hyper_connection.mix_coefficients",
        size=f"{rows} rows, 20 rounds",
        bytes=rows * 4 * (24 + 1 + 24),
        flops=0,
        make=make,
        run=run,
        torch=None,
        check=check,
    )
