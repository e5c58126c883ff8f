"""Cases of the attention operators."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from examples.kernel_cases.case import Case, Check, seeded
from tilelang_ops.attention import sparse_attention
from tilelang_ops.attention.sparse_attention import reference
from tilelang_ops.common.numerics import decode_fp4, decode_fp8, encode_fp4, encode_fp8

HEADS, WIDTH, WINDOW, SELECTED = 64, 512, 128, 512
RING = 134
SCALE = WIDTH**-0.5


def cases(small: bool = False) -> list[Case]:
    """The cases of this family."""
    found = [
        ("decode, 64 requests x 4 rows", 256, True),
        ("decode, 4 requests x 1 row", 4, True),
        ("prefill, 4,096 rows", 4096, True),
        ("drafter, 64 requests x 5 rows, window only", 320, False),
    ]
    requests, entries = (2, 1024) if small else (64, 8192)
    return [_case(size, 3 if small else rows, has, requests, entries) for size, rows, has in found]


def _case(size: str, rows: int, has_main: bool, requests: int, num_entries: int) -> Case:
    """The pools have `num_entries` entries of each of `requests` requests."""
    keys = WINDOW + SELECTED if has_main else WINDOW + 5
    read = 528 * WINDOW + 288 * SELECTED + 4 * keys if has_main else 532 * keys
    pools: list[tuple[Tensor, Tensor]] = []

    def make(seed: int) -> tuple[Tensor | float | None, ...]:
        generator = seeded(seed)
        if not pools:  # one for all copies: larger than the cache
            pools.append(_pools(seeded(12345), requests, num_entries))
        window, main = pools[0]

        def lists(count: int, width: int, records: int) -> Tensor:
            index = torch.rand(rows, records, generator=generator)
            index = index.topk(width, dim=1).indices.sort(1).values.int()
            return index + torch.arange(rows, dtype=torch.int32)[:, None] * count % (requests * count)

        q = torch.randn(rows, HEADS, WIDTH, generator=generator).bfloat16()
        sink = torch.randn(HEADS, generator=generator)
        entries = lists(num_entries, SELECTED, num_entries) if has_main else None
        window_index = lists(RING, min(keys, WINDOW) if has_main else keys, RING)
        return q, window, window_index, main if has_main else None, entries, sink, SCALE

    return Case(
        op="attention.sparse_attention",
        size=size,
        bytes=rows * (read + 4 * HEADS * WIDTH),
        flops=4 * rows * HEADS * keys * WIDTH,
        make=make,
        run=sparse_attention,
        torch=_in_torch,
        check=_near(rtol=2.0**-8, atol=2.0**-9),
        check_torch=_near(rtol=2.0**-6, atol=2.0**-6),  # logits are rounded to bfloat16
    )


def _pools(generator: torch.Generator, requests: int, entries: int) -> tuple[Tensor, Tensor]:
    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, WIDTH, generator=generator)

    window = torch.cat(encode_fp8(random(requests, RING)), dim=-1)
    parts = [torch.cat(encode_fp4(random(entries // 64, 64)), dim=-1) for _ in range(requests)]
    return window, torch.cat(parts)


def _in_torch(
    q: Tensor,
    window: Tensor,
    window_index: Tensor,
    main: Tensor | None,
    main_index: Tensor | None,
    sink: Tensor,
    scale: float,
) -> Tensor:
    records = window.flatten(0, 1)[window_index.long()]
    keys = [decode_fp8(records[..., :WIDTH], records[..., WIDTH:]).bfloat16()]
    if main is not None and main_index is not None:
        records = main.flatten(0, 1)[main_index.long()]
        keys.append(decode_fp4(records[..., : WIDTH // 2], records[..., WIDTH // 2 :]).bfloat16())
    key = torch.cat(keys, dim=1)
    logits = torch.einsum("rhd,rkd->rhk", q, key).float() * scale
    logits = torch.cat([logits, sink[None, :, None].expand(q.shape[0], -1, 1)], dim=2)
    return torch.einsum("rhk,rkd->rhd", logits.softmax(2)[..., :-1].bfloat16(), key)


def _near(rtol: float, atol: float) -> Check:
    """Some of the rows are like a computation in float64."""

    def check(out: Tensor, args: tuple[Any, ...]) -> None:
        q, window, window_index, main, main_index, *rest = args
        some = slice(0, None, max(1, q.shape[0] // 8))
        entries = None if main_index is None else main_index[some]
        with q.device:
            exact = reference.attend(q[some], window, window_index[some], main, entries, *rest, torch.float64)
        torch.testing.assert_close(out[some].double(), exact, rtol=rtol, atol=atol)

    return check
