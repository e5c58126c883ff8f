"""Cases of the indexer: scores over long contexts, and the choice of entries."""

from __future__ import annotations

import torch
from torch import Tensor

from examples.kernel_cases.case import Case
from tilelang_ops.common.numerics import decode_mxfp4
from tilelang_ops.indexer import index_scores
from tilelang_ops.kv_index import candidate_blocks, keep_candidates, select_entries

HEADS, WIDTH, ENTRIES = 32, 128, 128
TOPK, BLOCK, NUM_BLOCKS = 512, 8, 2048


def cases() -> list[Case]:
    """The cases of this family."""
    scores = [_scores(64, 4, 131072), _scores(64, 4, 16384), _scores(1, 1024, 16384)]
    return [*scores, *(_select(256, width) for width in (16384, 131072)), _blocks(256, 131072)]


def _scores(sequences: int, rows: int, keys: int) -> Case:
    """`rows` queries of each of `sequences` sequences that have `keys` keys each."""
    blocks = sequences * keys // ENTRIES

    def make(seed: int) -> tuple[Tensor, ...]:
        generator = torch.Generator("cuda").manual_seed(seed)

        def numbers(high: int, *shape: int) -> Tensor:
            return torch.randint(0, high, shape, generator=generator, device="cuda", dtype=torch.uint8)

        q = torch.randint(
            -6, 7, (sequences * rows, HEADS, WIDTH), generator=generator, device="cuda"
        ).bfloat16()
        weights = torch.randn(sequences * rows, HEADS, generator=generator, device="cuda") / 64
        codes, scales = numbers(256, blocks, ENTRIES, 64), 120 + numbers(8, blocks, ENTRIES, 4)
        tables = torch.randperm(blocks, generator=generator, device="cuda").int().view(sequences, -1)
        row_seq = torch.arange(sequences, device="cuda").repeat_interleave(rows).int()
        visible = torch.full_like(row_seq, keys)
        return q, weights, codes, scales, tables, row_seq, visible, keys

    def check(out: Tensor, arguments: tuple[Tensor, ...]) -> None:
        q, weights, codes, scales, tables, row_seq, _, _ = arguments
        for row in (0, q.shape[0] - 1):
            blocks = tables[row_seq[row]].long()
            key = decode_mxfp4(codes[blocks], scales[blocks]).flatten(0, 1).double()
            expected = weights[row].double() @ (q[row].double() @ key.T).relu()
            torch.testing.assert_close(out[row].double(), expected, rtol=1e-4, atol=1e-3)

    return Case(
        op="indexer.index_scores",
        size=f"{sequences} sequences of {rows} rows, {keys} keys",
        bytes=sequences * keys * 68 + sequences * rows * (keys * 4 + HEADS * WIDTH * 2),
        flops=2 * sequences * rows * keys * HEADS * WIDTH,
        make=make,
        run=index_scores,
        torch=None,
        check=check,
    )


def _row_scores(seed: int, rows: int, width: int) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(rows, width, generator=generator, device="cuda")


def _select(rows: int, width: int) -> Case:
    def in_torch(scores: Tensor) -> Tensor:
        return scores.topk(TOPK, dim=1).indices.sort(dim=1).values.int()

    def check(out: Tensor, arguments: tuple[Tensor, ...]) -> None:
        assert torch.equal(out, in_torch(*arguments))

    return Case(
        op="kv_index.select_entries",
        size=f"{TOPK} of {width}, {rows} rows",
        bytes=rows * (width + TOPK) * 4,
        flops=0,
        make=lambda seed: (_row_scores(seed, rows, width),),
        run=lambda scores: select_entries(scores, TOPK),
        torch=in_torch,
        check=check,
    )


def _blocks(rows: int, width: int) -> Case:
    def make(seed: int) -> tuple[Tensor, Tensor]:
        return _row_scores(seed, rows, width), torch.full((rows,), width, dtype=torch.int32, device="cuda")

    def run(scores: Tensor, visible: Tensor) -> Tensor:
        blocks = candidate_blocks(scores, visible, BLOCK, NUM_BLOCKS)
        keep_candidates(scores, blocks, BLOCK)
        return blocks

    def check(out: Tensor, arguments: tuple[Tensor, Tensor]) -> None:
        kept = torch.isfinite(arguments[0]).view(rows, -1, BLOCK).any(-1)
        chosen = torch.zeros_like(kept).scatter_(1, out.long(), True)
        assert torch.equal(kept, chosen) and (chosen.sum(1) == NUM_BLOCKS).all()

    return Case(
        op="kv_index.candidate_blocks, keep_candidates",
        size=f"{NUM_BLOCKS} blocks of {BLOCK} among {width}, {rows} rows",
        bytes=rows * width * 8,
        flops=0,
        make=make,
        run=run,
        torch=None,
        check=check,
    )
