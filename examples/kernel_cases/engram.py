"""Cases of the Engram operators: row numbers, table rows, the gate."""

from __future__ import annotations

import torch
from torch import Tensor

from examples.kernel_cases.case import Case
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


def cases() -> list[Case]:
    """The cases of this family."""
    return [
        *(_hash_ngrams(tokens) for tokens in (320, 4096)),
        *(_gather(tokens) for tokens in (320, 4096)),
        _gather_from_host(320),
        *(_gate_streams(tokens) for tokens in (64, 320, 4096)),
    ]


def _generator(seed: int) -> torch.Generator:
    return torch.Generator("cuda").manual_seed(seed)


def _hash_ngrams(tokens: int) -> Case:
    multipliers = torch.tensor(
        [
            [76632096046245, 4839876093313, 35959672319349, 73987337458391],
            [67716810739261, 51510806800915, 30921347202721, 82619226485591],
        ],
        device="cuda",
    )
    primes = 16000057 + 2 * torch.arange(TABLES * COLUMNS, device="cuda").view(TABLES, COLUMNS)
    offsets = primes.cumsum(1) - primes

    def make(seed: int) -> tuple[Tensor, ...]:
        ids = torch.randint(
            99092, (tokens, MAX_NGRAM), generator=_generator(seed), device="cuda", dtype=torch.int32
        )
        return ids, multipliers, primes, offsets

    return Case(
        op="engram.hash_ngrams",
        size=f"{tokens} tokens, {TABLES} tables of {COLUMNS} columns",
        bytes=tokens * (MAX_NGRAM + TABLES * COLUMNS) * 4,
        flops=0,
        make=make,
        run=hash_ngrams,
        torch=hash_reference.run,
        check=lambda out, args: _assert_equal(out, hash_reference.run(*args)),
    )


def _gather(tokens: int) -> Case:
    codes, scales = _table(TABLE_ROWS, "cuda")
    return _gather_case(tokens, codes, scales, f"{tokens} tokens of {COLUMNS} rows of {WIDTH} bytes")


def _gather_from_host(tokens: int) -> Case:
    codes, scales = (part.cpu().pin_memory() for part in _table(HOST_ROWS, "cuda"))
    return _gather_case(tokens, codes, scales, f"{tokens} tokens, table in pinned host memory")


def _table(rows: int, device: str) -> tuple[Tensor, Tensor]:
    codes = torch.empty(rows, WIDTH, dtype=torch.uint8, device=device)
    codes.view(torch.int32).random_(generator=_generator(0))
    codes &= 0xBF  # no NaN
    scales = torch.randint(110, 140, (rows, WIDTH // 32), device=device, generator=_generator(1))
    return codes, scales.to(torch.uint8)


def _gather_case(tokens: int, codes: Tensor, scales: Tensor, size: str) -> Case:
    def make(seed: int) -> tuple[Tensor, Tensor, Tensor, torch.dtype]:
        index = torch.randint(
            codes.shape[0], (tokens, COLUMNS), generator=_generator(seed), device="cuda", dtype=torch.int32
        )
        return codes, scales, index, torch.bfloat16

    def check(out: Tensor, args: tuple) -> None:
        index = args[2].to(codes.device)
        _assert_equal(out, gather_reference.run(codes, scales, index, torch.bfloat16).to("cuda"))

    return Case(
        op="memory.gather_dequantize",
        size=size,
        bytes=tokens * COLUMNS * (4 + WIDTH + WIDTH // 32 + 2 * WIDTH),
        flops=0,
        make=make,
        run=gather_dequantize,
        torch=gather_reference.run if codes.is_cuda else None,
        check=check,
    )


def _gate_streams(tokens: int) -> Case:
    weight = torch.randn(STREAMS, HIDDEN, generator=_generator(0), device="cuda")

    def make(seed: int) -> tuple[Tensor, Tensor, Tensor, float]:
        generator = _generator(seed)
        streams = torch.randn(tokens, STREAMS, HIDDEN, generator=generator, device="cuda").bfloat16()
        key_value = torch.randn(tokens, (STREAMS + 1) * HIDDEN, generator=generator, device="cuda").bfloat16()
        return streams, key_value, weight, 1e-6

    return Case(
        op="engram.gate_streams",
        size=f"{tokens} tokens, {STREAMS} streams of {HIDDEN} channels",
        bytes=tokens * (3 * STREAMS + 1) * HIDDEN * 2 + weight.nbytes,
        flops=0,
        make=make,
        run=gate_streams,
        torch=gate_reference.run,
        check=lambda out, args: torch.testing.assert_close(
            out.float(), gate_reference.run(*args).float(), rtol=2.0**-7, atol=1e-2
        ),
    )


def _assert_equal(actual: Tensor, expected: Tensor) -> None:
    assert torch.equal(actual, expected)
