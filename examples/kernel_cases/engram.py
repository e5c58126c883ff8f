"""Cases of the Engram operators: row numbers, table rows, the gate."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from examples.kernel_cases.case import Case, equal, near, seeded
from tilelang_ops.common.numerics import decode_fp8
from tilelang_ops.engram import gate_streams, hash_ngrams
from tilelang_ops.engram.gate_streams import reference as gate_reference
from tilelang_ops.engram.hash_ngrams import reference as hash_reference
from tilelang_ops.memory import gather_dequantize
from tilelang_ops.memory.gather_dequantize import reference as gather_reference

TABLES, COLUMNS, MAX_NGRAM = 2, 24, 4
WIDTH = 256  # of a table row
STREAMS, HIDDEN = 4, 5120
TABLE_ROWS = 32 << 20  # 8 GB; the release's table has twelve times as many
HOST_ROWS = 4 << 20


def cases(small: bool = False) -> list[Case]:
    """The cases of this family."""
    table_rows, host_rows = (1000, 1000) if small else (TABLE_ROWS, HOST_ROWS)
    sizes = (3, 20) if small else (320, 4096)
    return [
        *(_hash_ngrams(tokens) for tokens in sizes),
        *(_gather(tokens, table_rows) for tokens in sizes),
        _gather_from_host(sizes[0], host_rows),
        *(_gate_streams(tokens) for tokens in ((3,) if small else (64, 320, 4096))),
    ]


def _hash_ngrams(tokens: int) -> Case:
    numbers = [
        [76632096046245, 4839876093313, 35959672319349, 73987337458391],
        [67716810739261, 51510806800915, 30921347202721, 82619226485591],
    ]

    def make(seed: int) -> tuple[Tensor, ...]:
        ids = torch.randint(99092, (tokens, MAX_NGRAM), generator=seeded(seed), dtype=torch.int32)
        primes = 16000057 + 2 * torch.arange(TABLES * COLUMNS).view(TABLES, COLUMNS)
        return ids, torch.tensor(numbers), primes, primes.cumsum(1) - primes

    return Case(
        op="engram.hash_ngrams",
        size=f"{tokens} tokens, {TABLES} tables of {COLUMNS} columns",
        bytes=tokens * (MAX_NGRAM + TABLES * COLUMNS) * 4,
        flops=0,
        make=make,
        run=hash_ngrams,
        torch=hash_reference.run,
        check=equal(hash_reference.run),
    )


def _gather(tokens: int, table_rows: int) -> Case:
    size = f"{tokens} tokens of {COLUMNS} rows of {WIDTH} bytes"
    return _gather_case(tokens, table_rows, False, gather_reference.run, size)


def _gather_from_host(tokens: int, table_rows: int) -> Case:
    def in_torch(codes: Tensor, scales: Tensor, index: Tensor, dtype: torch.dtype) -> Tensor:
        rows = index.flatten().cpu()
        parts = (part.index_select(0, rows).to(index.device) for part in (codes, scales))
        return decode_fp8(*parts).to(dtype).view(*index.shape, WIDTH)

    size = f"{tokens} tokens, table in pinned host memory"
    return _gather_case(tokens, table_rows, True, in_torch, size)


@cache
def _table(rows: int, device: torch.device) -> tuple[Tensor, Tensor]:
    codes = torch.empty(rows, WIDTH, dtype=torch.uint8)
    codes.view(torch.int32).random_(generator=seeded(0))
    codes &= 0xBF  # no NaN
    return codes, torch.randint(110, 140, (rows, WIDTH // 32), generator=seeded(1)).to(torch.uint8)


@cache
def _host_table(rows: int, device: torch.device) -> tuple[Tensor, ...]:
    """The same in the host's memory, pinned where the device is a GPU."""
    return tuple(p.cpu().pin_memory() if p.is_cuda else p for p in _table.__wrapped__(rows, device))


def _gather_case(
    tokens: int, table_rows: int, is_host: bool, in_torch: Callable[..., Tensor], size: str
) -> Case:
    def make(seed: int) -> tuple[Tensor, Tensor, Tensor, torch.dtype]:
        codes, scales = (_host_table if is_host else _table)(table_rows, torch.get_default_device())
        index = torch.randint(table_rows, (tokens, COLUMNS), generator=seeded(seed), dtype=torch.int32)
        return codes, scales, index, torch.bfloat16

    def expected(codes: Tensor, scales: Tensor, index: Tensor, dtype: torch.dtype) -> Tensor:
        return gather_reference.run(codes, scales, index.to(codes.device), dtype).to(index.device)

    return Case(
        op="memory.gather_dequantize",
        size=size,
        bytes=tokens * COLUMNS * (4 + WIDTH + WIDTH // 32 + 2 * WIDTH),
        flops=0,
        make=make,
        run=gather_dequantize,
        torch=in_torch,
        check=equal(expected),
    )


def _gate_streams(tokens: int) -> Case:
    def make(seed: int) -> tuple[Tensor, Tensor, Tensor, float]:
        generator = seeded(seed)
        weight = torch.randn(STREAMS, HIDDEN, generator=generator)
        streams = torch.randn(tokens, STREAMS, HIDDEN, generator=generator).bfloat16()
        key_value = torch.randn(tokens, (STREAMS + 1) * HIDDEN, generator=generator).bfloat16()
        return streams, key_value, weight, 1e-6

    return Case(
        op="engram.gate_streams",
        size=f"{tokens} tokens, {STREAMS} streams of {HIDDEN} channels",
        bytes=tokens * (3 * STREAMS + 1) * HIDDEN * 2 + STREAMS * HIDDEN * 4,
        flops=0,
        make=make,
        run=gate_streams,
        torch=gate_reference.run,
        check=near(gate_reference.run, rtol=2.0**-7, atol=1e-2),
    )
