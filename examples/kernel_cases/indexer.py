"""Cases of the indexer: scores over long contexts, and the choice of entries."""

from __future__ import annotations

import torch
from torch import Tensor

from examples.kernel_cases.case import Case
from tilelang_ops.common.numerics import decode_mxfp4
from tilelang_ops.indexer import candidate_scores, index_scores
from tilelang_ops.kv_index import candidate_blocks, select_entries

HEADS, WIDTH, ENTRIES = 32, 128, 128
TOPK, BLOCK, NUM_BLOCKS = 512, 8, 2048


def cases() -> list[Case]:
    """The cases of this family."""
    scores = [_scores(64, 4, 131072), _scores(64, 4, 16384), _scores(1, 1024, 16384)]
    choices = [*(_select(256, width) for width in (16384, 131072)), _blocks(256, 131072)]
    return [*scores, _candidates(64, 4, 131072), *choices, _chosen(256)]


def _keys(seed: int, sequences: int, rows: int, keys: int) -> tuple[Tensor, ...]:
    """Arguments of `index_scores` in front of the width."""
    blocks = sequences * keys // ENTRIES
    generator = torch.Generator("cuda").manual_seed(seed)

    def numbers(high: int, *shape: int) -> Tensor:
        return torch.randint(0, high, shape, generator=generator, device="cuda", dtype=torch.uint8)

    q = torch.randint(-6, 7, (sequences * rows, HEADS, WIDTH), generator=generator, device="cuda").bfloat16()
    weights = torch.randn(sequences * rows, HEADS, generator=generator, device="cuda").bfloat16() / 64
    codes, scales = numbers(256, blocks, ENTRIES, 64), 120 + numbers(8, blocks, ENTRIES, 4)
    tables = torch.randperm(blocks, generator=generator, device="cuda").int().view(sequences, -1)
    row_seq = torch.arange(sequences, device="cuda").repeat_interleave(rows).int()
    return q, weights, codes, scales, tables, row_seq, torch.full_like(row_seq, keys)


def _scores(sequences: int, rows: int, keys: int) -> Case:
    """`rows` queries of each of `sequences` sequences that have `keys` keys each."""

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
        make=lambda seed: (*_keys(seed, sequences, rows, keys), keys),
        run=index_scores,
        torch=None,
        check=check,
    )


def _candidates(sequences: int, rows: int, keys: int) -> Case:
    """Scores of each row's own candidate blocks; keys are counted for each row."""

    def make(seed: int) -> tuple[Tensor, ...]:
        generator = torch.Generator("cuda").manual_seed(seed)
        order = torch.rand(sequences * rows, keys // BLOCK, generator=generator, device="cuda").argsort(dim=1)
        blocks = order[:, :NUM_BLOCKS].sort(dim=1).values.int()
        return *_keys(seed, sequences, rows, keys), blocks, BLOCK

    def check(out: Tensor, arguments: tuple[Tensor, ...]) -> None:
        entries = (arguments[7][:, :, None] * BLOCK + torch.arange(BLOCK, device="cuda")).flatten(1)
        assert torch.equal(out, index_scores(*arguments[:7], keys).gather(1, entries.long()))

    chosen = sequences * rows * NUM_BLOCKS * BLOCK
    return Case(
        op="indexer.candidate_scores",
        size=f"{sequences} sequences of {rows} rows, {NUM_BLOCKS} blocks of {BLOCK} each",
        bytes=chosen * (68 + 4) + sequences * rows * HEADS * WIDTH * 2,
        flops=2 * chosen * HEADS * WIDTH,
        make=make,
        run=candidate_scores,
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

    def in_torch(scores: Tensor, _: Tensor) -> Tensor:
        maxima = scores.view(rows, -1, BLOCK).amax(-1)
        maxima[:, -1] = torch.inf
        return maxima.topk(NUM_BLOCKS, dim=1).indices.sort(dim=1).values.int()

    def check(out: Tensor, arguments: tuple[Tensor, Tensor]) -> None:
        assert torch.equal(out, in_torch(*arguments))

    return Case(
        op="kv_index.candidate_blocks",
        size=f"{NUM_BLOCKS} blocks of {BLOCK} among {width}, {rows} rows",
        bytes=rows * (width + NUM_BLOCKS) * 4,
        flops=0,
        make=make,
        run=lambda scores, visible: candidate_blocks(scores, visible, BLOCK, NUM_BLOCKS),
        torch=in_torch,
        check=check,
    )


def _chosen(rows: int) -> Case:
    """The best entries among those of candidate blocks."""
    width = NUM_BLOCKS * BLOCK

    def make(seed: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator("cuda").manual_seed(seed)
        blocks = torch.rand(rows, 4 * NUM_BLOCKS, generator=generator, device="cuda").argsort(dim=1)
        return _row_scores(seed, rows, width), blocks[:, :NUM_BLOCKS].sort(dim=1).values.int()

    def check(out: Tensor, arguments: tuple[Tensor, Tensor]) -> None:
        scores, blocks = arguments
        columns = scores.topk(TOPK, dim=1).indices.sort(dim=1).values
        assert torch.equal(out, (blocks.gather(1, columns // BLOCK) * BLOCK + columns % BLOCK).int())

    return Case(
        op="kv_index.select_entries",
        size=f"{TOPK} entries of {NUM_BLOCKS} blocks of {BLOCK}, {rows} rows",
        bytes=rows * (width + 2 * TOPK) * 4,
        flops=0,
        make=make,
        run=lambda scores, blocks: select_entries(scores, TOPK, blocks, BLOCK),
        torch=None,
        check=check,
    )
