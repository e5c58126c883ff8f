"""Cases of the attention operators."""

from __future__ import annotations

import torch
from torch import Tensor

from examples.kernel_cases.case import Case
from tilelang_ops.attention import sparse_attention
from tilelang_ops.attention.sparse_attention import reference
from tilelang_ops.common.numerics import decode_fp4, decode_fp8, encode_fp4, encode_fp8

HEADS, WIDTH, WINDOW, SELECTED = 64, 512, 128, 512
RING = 134
REQUESTS, ENTRIES = 64, 8192  # of the pools
SCALE = WIDTH**-0.5


def cases() -> list[Case]:
    """The cases of this family."""
    return [
        _case("decode, 64 requests x 4 rows", 256, True),
        _case("decode, 4 requests x 1 row", 4, True),
        _case("prefill, 4,096 rows", 4096, True),
        _case("drafter, 64 requests x 5 rows, window only", 320, False),
    ]


def _case(size: str, rows: int, has_main: bool) -> Case:
    keys = WINDOW + SELECTED if has_main else WINDOW + 5
    read = 528 * WINDOW + 288 * SELECTED + 4 * keys if has_main else 532 * keys
    pools: list[tuple[Tensor, Tensor]] = []

    def make(seed: int) -> tuple[Tensor | float | None, ...]:
        generator = torch.Generator("cuda").manual_seed(seed)
        if not pools:  # one for all copies: larger than the cache
            pools.append(_pools(generator))
        window, main = pools[0]

        def lists(count: int, width: int, records: int) -> Tensor:
            index = torch.rand(rows, records, generator=generator, device="cuda")
            index = index.topk(width, dim=1).indices.sort(1).values.int()
            return index + torch.arange(rows, dtype=torch.int32, device="cuda")[:, None] * count % (
                REQUESTS * count
            )

        q = torch.randn(rows, HEADS, WIDTH, generator=generator, device="cuda").bfloat16()
        sink = torch.randn(HEADS, generator=generator, device="cuda")
        entries = lists(ENTRIES, SELECTED, ENTRIES) if has_main else None
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
        check=_check,
    )


def _pools(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, WIDTH, generator=generator, device="cuda")

    window = torch.cat(encode_fp8(random(REQUESTS, RING)), dim=-1)
    parts = [torch.cat(encode_fp4(random(ENTRIES // 64, 64)), dim=-1) for _ in range(REQUESTS)]
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


def _check(out: Tensor, args: tuple[Tensor | float | None, ...]) -> None:
    q, window, window_index, main, main_index, sink, scale = args
    some = slice(0, None, max(1, q.shape[0] // 8))
    expected = reference.attend(
        *(a.cpu() for a in (q[some], window)),
        window_index[some].cpu(),
        None if main is None else main.cpu(),
        None if main_index is None else main_index[some].cpu(),
        sink.cpu(),
        scale,
        torch.float64,
    )
    torch.testing.assert_close(out[some].cpu().double(), expected, rtol=2.0**-8, atol=2.0**-9)
