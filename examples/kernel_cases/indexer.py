"""Cases of the indexer: scores over long contexts, and the choice of entries."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from examples.kernel_cases.case import BFLOAT16_RATE, FP8_RATE, Case, Check, equal, seeded
from tilelang_ops.common.numerics import decode_mxfp4
from tilelang_ops.indexer import candidate_scores, index_scores
from tilelang_ops.kv_index import candidate_blocks, select_entries

HEADS, WIDTH, ENTRIES = 32, 128, 128
TOPK, BLOCK = 512, 8
ERROR, FP8_ERROR = {"rtol": 1e-4, "atol": 1e-3}, {"rtol": 2.0**-8, "atol": 0.05}
TABLE_BYTES = 1 << 30  # of what the work in torch makes of keys at once


def cases(small: bool = False) -> list[Case]:
    """The cases of this family."""
    if small:
        return [
            _scores(2, 2, 512),
            _candidates(2, 2, 1024, 40),
            _select(3, 1024),
            _blocks(3, 1024, 40),
            _chosen(3, 80),
        ]
    scores = [
        _scores(*size, in_fp8=in_fp8)
        for in_fp8 in (False, True)
        for size in ((64, 4, 131072), (64, 4, 16384), (1, 1024, 16384))
    ]
    candidates = [_candidates(64, 4, 131072, 2048, in_fp8) for in_fp8 in (False, True)]
    choices = [*(_select(256, width) for width in (16384, 131072)), _blocks(256, 131072, 2048)]
    return [*scores, *candidates, *choices, _chosen(256, 2048)]


def _keys(seed: int, sequences: int, rows: int, keys: int) -> tuple[Tensor, ...]:
    """Arguments of `index_scores` in front of the width."""
    blocks = sequences * keys // ENTRIES
    generator = seeded(seed)

    def numbers(high: int, *shape: int) -> Tensor:
        return torch.randint(0, high, shape, generator=generator, dtype=torch.uint8)

    q = torch.randint(-6, 7, (sequences * rows, HEADS, WIDTH), generator=generator).bfloat16()
    weights = torch.randn(sequences * rows, HEADS, generator=generator).bfloat16() / 64
    codes, scales = numbers(256, blocks, ENTRIES, 64), 120 + numbers(8, blocks, ENTRIES, 4)
    tables = torch.randperm(blocks, generator=generator).int().view(sequences, -1)
    row_seq = torch.arange(sequences).repeat_interleave(rows).int()
    return q, weights, codes, scales, tables, row_seq, torch.full_like(row_seq, keys)


def _in_fp8(is_so: bool) -> str:
    return ", in FP8" if is_so else ""


def _weighted(q: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
    """Scores of [batch, rows, heads, width] queries for [batch, keys, width]."""
    products = torch.einsum("brhd,bkd->brhk", q, keys).relu_()
    return torch.einsum("brh,brhk->brk", weights, products)


def _near_exact(keys_of: Callable[..., Tensor], rtol: float, atol: float) -> Check:
    """The first and the last row are like a computation in float64; (row, arguments) -> its keys."""

    def check(out: Tensor, args: tuple[Any, ...]) -> None:
        q, weights = args[:2]
        for row in (0, q.shape[0] - 1):
            exact = _weighted(
                *(x[row].double()[None, None] for x in (q, weights)), keys_of(row, *args).double()[None]
            )
            torch.testing.assert_close(out[row].double(), exact[0, 0], rtol=rtol, atol=atol)

    return check


def _scores(sequences: int, rows: int, keys: int, in_fp8: bool = False) -> Case:
    """`rows` queries of each of `sequences` sequences that have `keys` keys each."""
    at_once = max(1, TABLE_BYTES // (4 * WIDTH * keys))

    def in_torch(
        q: Tensor, weights: Tensor, codes: Tensor, scales: Tensor, tables: Tensor, *rest: Any
    ) -> Tensor:
        q, weights = (x.unflatten(0, (sequences, rows)) for x in (q, weights))
        parts = zip(*(x.split(at_once) for x in (q, weights, tables)), strict=True)
        scores = [
            _weighted(q, w, decode_mxfp4(codes[table], scales[table]).bfloat16().flatten(1, 2))
            for q, w, table in parts
        ]
        return torch.cat(scores).float().flatten(0, 1)

    def keys_of(
        row: int, q: Tensor, _: Tensor, codes: Tensor, scales: Tensor, tables: Tensor, *rest: Any
    ) -> Tensor:
        blocks = tables[row // rows].long()
        return decode_mxfp4(codes[blocks], scales[blocks]).flatten(0, 1)

    return Case(
        op="indexer.index_scores",
        size=f"{sequences} sequences of {rows} rows, {keys} keys{_in_fp8(in_fp8)}",
        bytes=sequences * keys * 68 + sequences * rows * (keys * 4 + HEADS * WIDTH * 2),
        flops=2 * sequences * rows * keys * HEADS * WIDTH,
        make=lambda seed: (*_keys(seed, sequences, rows, keys), keys),
        run=lambda *args: index_scores(*args, in_fp8=in_fp8),
        torch=in_torch,
        check=_near_exact(keys_of, **(FP8_ERROR if in_fp8 else ERROR)),
        rate=FP8_RATE if in_fp8 else BFLOAT16_RATE,
        check_torch=_near_exact(keys_of, rtol=2.0**-7, atol=0.1),  # products and sums are rounded to bfloat16
    )


def _candidates(sequences: int, rows: int, keys: int, num_blocks: int, in_fp8: bool = False) -> Case:
    """Scores of each row's own candidate blocks; keys are counted for each row."""
    chosen = num_blocks * BLOCK  # of a row
    at_once = max(1, TABLE_BYTES // (4 * WIDTH * chosen))

    def make(seed: int) -> tuple[Any, ...]:
        order = torch.rand(sequences * rows, keys // BLOCK, generator=seeded(seed)).argsort(dim=1)
        blocks = order[:, :num_blocks].sort(dim=1).values.int()
        return *_keys(seed, sequences, rows, keys), blocks, BLOCK

    def keys_of(rows: Tensor, q: Tensor, _: Tensor, *rest: Any) -> Tensor:
        codes, scales, tables, row_seq, _, blocks, _ = rest
        entry = (blocks[rows][:, :, None] * BLOCK + torch.arange(BLOCK, device=q.device)).flatten(1)
        block = tables[row_seq[rows]].gather(1, entry // ENTRIES)
        return decode_mxfp4(codes[block, entry % ENTRIES], scales[block, entry % ENTRIES])

    def in_torch(q: Tensor, weights: Tensor, *rest: Any) -> Tensor:
        parts = torch.arange(q.shape[0], device=q.device).split(at_once)
        scores = [
            _weighted(q[r][:, None], weights[r][:, None], keys_of(r, q, weights, *rest).bfloat16())
            for r in parts
        ]
        return torch.cat(scores).squeeze(1).float()

    def keys_of_row(row: int, q: Tensor, *rest: Any) -> Tensor:
        return keys_of(torch.tensor([row], device=q.device), q, *rest)[0]

    return Case(
        op="indexer.candidate_scores",
        size=f"{sequences} sequences of {rows} rows, {num_blocks} blocks of {BLOCK} each{_in_fp8(in_fp8)}",
        bytes=sequences * rows * (chosen * (68 + 4) + HEADS * WIDTH * 2),
        flops=2 * sequences * rows * chosen * HEADS * WIDTH,
        make=make,
        run=lambda *args: candidate_scores(*args, in_fp8=in_fp8),
        torch=in_torch,
        check=_near_exact(keys_of_row, **(FP8_ERROR if in_fp8 else ERROR)),
        rate=FP8_RATE if in_fp8 else BFLOAT16_RATE,
        check_torch=_near_exact(keys_of_row, rtol=2.0**-7, atol=0.1),
    )


def _row_scores(seed: int, rows: int, width: int) -> Tensor:
    generator = seeded(seed)
    return torch.randn(rows, width, generator=generator)


def _select(rows: int, width: int) -> Case:
    def in_torch(scores: Tensor) -> Tensor:
        return scores.topk(TOPK, dim=1).indices.sort(dim=1).values.int()

    return Case(
        op="kv_index.select_entries",
        size=f"{TOPK} of {width}, {rows} rows",
        bytes=rows * (width + TOPK) * 4,
        flops=0,
        make=lambda seed: (_row_scores(seed, rows, width),),
        run=lambda scores: select_entries(scores, TOPK),
        torch=in_torch,
        check=equal(in_torch),
    )


def _blocks(rows: int, width: int, num_blocks: int) -> Case:
    def make(seed: int) -> tuple[Tensor, Tensor]:
        return _row_scores(seed, rows, width), torch.full((rows,), width, dtype=torch.int32)

    def in_torch(scores: Tensor, _: Tensor) -> Tensor:
        maxima = scores.view(rows, -1, BLOCK).amax(-1)
        maxima[:, -1] = torch.inf
        return maxima.topk(num_blocks, dim=1).indices.sort(dim=1).values.int()

    return Case(
        op="kv_index.candidate_blocks",
        size=f"{num_blocks} blocks of {BLOCK} among {width}, {rows} rows",
        bytes=rows * (width + num_blocks) * 4,
        flops=0,
        make=make,
        run=lambda scores, visible: candidate_blocks(scores, visible, BLOCK, num_blocks),
        torch=in_torch,
        check=equal(in_torch),
    )


def _chosen(rows: int, num_blocks: int) -> Case:
    """The best entries among those of candidate blocks."""
    width = num_blocks * BLOCK

    def make(seed: int) -> tuple[Tensor, Tensor]:
        generator = seeded(seed)
        blocks = torch.rand(rows, 4 * num_blocks, generator=generator).argsort(dim=1)
        return _row_scores(seed, rows, width), blocks[:, :num_blocks].sort(dim=1).values.int()

    def in_torch(scores: Tensor, blocks: Tensor) -> Tensor:
        columns = scores.topk(TOPK, dim=1).indices.sort(dim=1).values
        return (blocks.gather(1, columns // BLOCK) * BLOCK + columns % BLOCK).int()

    return Case(
        op="kv_index.select_entries",
        size=f"{TOPK} entries of {num_blocks} blocks of {BLOCK}, {rows} rows",
        bytes=rows * (width + 2 * TOPK) * 4,
        flops=0,
        make=make,
        run=lambda scores, blocks: select_entries(scores, TOPK, blocks, BLOCK),
        torch=in_torch,
        check=equal(in_torch),
    )
