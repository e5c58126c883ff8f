"""Cases of the operators that make a step's index lists and inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from examples.kernel_cases.case import Case, equal, seeded
from tilelang_ops.kv_index import (
    concat_index,
    decode_metadata,
    entry_slots,
    prefill_metadata,
    ring_range_index,
    visible_entries,
    window_index,
)
from tilelang_ops.kv_index.concat_index import reference as concat_index_reference
from tilelang_ops.kv_index.decode_metadata import reference as decode_metadata_reference
from tilelang_ops.kv_index.entry_slots import reference as entry_slots_reference
from tilelang_ops.kv_index.prefill_metadata import reference as prefill_metadata_reference
from tilelang_ops.kv_index.range_index import reference as range_index_reference
from tilelang_ops.kv_index.visible_entries import reference as visible_entries_reference
from tilelang_ops.kv_index.window_index import reference as window_index_reference
from tilelang_ops.speculative import redistribute
from tilelang_ops.speculative.redistribute import reference as redistribute_reference
from tilelang_ops.step_inputs import correct_rows, deal_rows, draft_inputs
from tilelang_ops.step_inputs.correct_rows import reference as correct_rows_reference
from tilelang_ops.step_inputs.deal_rows import reference as deal_rows_reference
from tilelang_ops.step_inputs.draft_inputs import reference as draft_inputs_reference

WINDOW, RING, TOPK, BLOCK = 128, 134, 512, 128
MAX_BLOCKS, VOCAB = 1024, 129280
LISTS = {"window": WINDOW, "ring": RING, "block_size": BLOCK, "ratios": (1, 2)}


def cases(small: bool = False) -> list[Case]:
    """The cases of this family."""
    found = [case for rows in ((5,) if small else (256, 8192)) for case in _lists(rows)]
    found += [case for seqs in ((4,) if small else (64, 256)) for case in _decode(seqs)]
    return [*found, _prefill(4, 300 if small else 8192)]


def _random(generator: torch.Generator, high: int, *shape: int, low: int = 0) -> Tensor:
    return torch.randint(low, high, shape, generator=generator, dtype=torch.int32)


def _case(
    name: str,
    size: str,
    num_bytes: int,
    make: Callable[[torch.Generator], tuple[Any, ...]],
    run: Callable[..., Any],
    meaning: Callable[..., Any],
    in_torch: Callable[..., Any] | None = None,
) -> Case:
    """A case with the bits of the reference, which is the work in torch too if no other is given."""
    return Case(
        op=name,
        size=size,
        bytes=num_bytes,
        flops=0,
        make=lambda seed: make(seeded(seed)),
        run=run,
        torch=in_torch or meaning,
        check=equal(meaning),
    )


def _lists(rows: int) -> list[Case]:
    """Lists with a row for each query."""

    def windows(g: torch.Generator) -> tuple[Any, ...]:
        return _random(g, 100000, rows), _random(g, 256, rows).long() * RING, WINDOW, RING

    def entries(g: torch.Generator) -> tuple[Any, ...]:
        chosen = _random(g, MAX_BLOCKS * 64, rows, TOPK).sort(1).values
        seqs = torch.arange(rows, dtype=torch.int32) % 64
        return chosen, seqs, _random(g, 100000, 64, MAX_BLOCKS), 64

    def visible(g: torch.Generator) -> tuple[Any, ...]:
        return _random(g, TOPK + 1, rows), TOPK

    def parts(g: torch.Generator) -> tuple[Any, ...]:
        return _random(g, 10**6, rows, WINDOW, low=-1), _random(g, 10**6, rows, TOPK, low=-1), 0, 10**6

    size = f"{rows} rows"
    return [
        _case(
            "kv_index.window_index",
            size,
            rows * (12 + 4 * WINDOW),
            windows,
            window_index,
            window_index_reference.run,
        ),
        _case(
            "kv_index.entry_slots",
            f"{size}, {TOPK} entries",
            rows * (4 + 8 * TOPK) + 64 * MAX_BLOCKS * 4,
            entries,
            entry_slots,
            entry_slots_reference.run,
        ),
        _case(
            "kv_index.visible_entries",
            f"{size}, {TOPK} entries",
            rows * 4 * (1 + TOPK),
            visible,
            visible_entries,
            visible_entries_reference.run,
        ),
        _case(
            "kv_index.concat_index",
            f"{size}, {WINDOW} + {TOPK}",
            rows * 8 * (WINDOW + TOPK),
            parts,
            concat_index,
            concat_index_reference.run,
        ),
    ]


def _sums(lens: Tensor) -> Tensor:
    return torch.nn.functional.pad(lens.cumsum(0), (1, 0)).int()


def _decode(seqs: int) -> list[Case]:
    """What a decode step of `seqs` sequences with 6 rows each derives."""
    rows, drafts = 6 * seqs, 5

    def metadata(g: torch.Generator) -> tuple[Any, ...]:
        cu = torch.arange(seqs + 1, dtype=torch.int32) * 6
        lens, slots = _random(g, 100000, seqs, low=6), _random(g, 300, seqs)
        return cu, lens, slots, _random(g, 100000, seqs, MAX_BLOCKS), rows

    def correction(g: torch.Generator) -> tuple[Any, ...]:
        seq = torch.arange(rows, dtype=torch.int32) // 6
        lens = _random(g, 100000, seqs, low=6)
        return (
            _random(g, VOCAB, rows),
            _random(g, 100000, rows),
            seq,
            _random(g, VOCAB, rows, 4),
            torch.arange(seqs + 1, dtype=torch.int32) * 6,
            lens,
            lens,
            torch.randperm(seqs, generator=g).int(),
            lens,
            _random(g, VOCAB, seqs, 3),
            _random(g, VOCAB, seqs, drafts + 1),
            _random(g, drafts + 2, seqs, low=1),
            _random(g, VOCAB, seqs, drafts),
            _random(g, VOCAB, VOCAB),
            torch.rand(VOCAB, generator=g) < 0.01,
            2,
        )

    names = ("sources", "committed_lens", "ngram_history", "emitted", "num_emitted", "drafts")
    names += ("token_map", "is_barrier", "pad_id")

    def dealing(g: torch.Generator) -> tuple[Any, ...]:
        dealt = _random(g, 7, seqs // 2, low=1)
        dealt = torch.cat([dealt, 7 - dealt])
        lens = _random(g, 100000, seqs, low=6)
        count = 7 * (seqs // 2)
        planned = _sums(torch.tensor([3, 4]).repeat(seqs // 2))
        return dealt, planned, lens, _random(g, VOCAB, count), _random(g, VOCAB, count, 4)

    def survivals(g: torch.Generator) -> tuple[Any, ...]:
        confidences = torch.rand(seqs, drafts, generator=g)
        sources = torch.randperm(seqs, generator=g).int()
        limits = torch.full_like(sources, drafts + 1)
        return 3 * seqs, sources, confidences, limits, torch.rand(drafts, generator=g) + 0.5

    def blocks(g: torch.Generator) -> tuple[Any, ...]:
        return _random(g, VOCAB, seqs), _random(g, 100000, seqs), _random(g, 300, seqs)

    block = {"block_size": drafts, "window": WINDOW, "ring": RING, "noise_token_id": 1}

    def ranges(g: torch.Generator) -> tuple[Any, ...]:
        cu = torch.arange(seqs + 1, dtype=torch.int32) * WINDOW
        return cu, _random(g, 100000, seqs), _random(g, 300, seqs), seqs * WINDOW, RING

    size = f"{seqs} sequences, {rows} rows"
    return [
        _case(
            "kv_index.decode_metadata",
            size,
            rows * (4 * 2 + 8 * 4 + 4 * WINDOW + 2 * 20) + seqs * 12,
            metadata,
            lambda *args: decode_metadata(*args, **LISTS),
            lambda *args: decode_metadata_reference.run(*args, *LISTS.values()),
        ),
        _case(
            "kv_index.ring_range_index",
            f"{seqs} windows",
            seqs * WINDOW * 8,
            ranges,
            ring_range_index,
            lambda cu, firsts, slots, *rest: range_index_reference.run(
                cu, firsts, slots.view(-1, 1), *rest, False
            ),
        ),
        _case(
            "step_inputs.correct_rows",
            size,
            rows * (4 + 8 + 16 + 4 * 4) + seqs * 40,
            correction,
            lambda *args: correct_rows(*args[:7], **dict(zip(names, args[7:], strict=True))),
            correct_rows_reference.run,
        ),
        _case(
            "step_inputs.deal_rows",
            f"{seqs} sequences, {7 * (seqs // 2)} rows",
            7 * (seqs // 2) * (20 + 12 + 20) + seqs * 20,
            dealing,
            deal_rows,
            deal_rows_reference.run,
        ),
        _case(
            "step_inputs.draft_inputs",
            f"{seqs} blocks of {drafts}",
            seqs * (12 + drafts * (16 + 4 * (WINDOW + drafts))),
            blocks,
            lambda *args: draft_inputs(*args, **block),
            lambda *args: draft_inputs_reference.run(*args, *block.values()),
        ),
        _case(
            "speculative.redistribute",
            f"{seqs} sequences, {drafts} drafts",
            seqs * (12 + 4 * drafts),
            survivals,
            redistribute,
            redistribute_reference.run,
            _redistribute,
        ),
    ]


def _redistribute(
    num_rows: int, sources: Tensor, confidences: Tensor, limits: Tensor, odds: Tensor
) -> Tensor:
    """Of sequences that all have a source."""
    survivals = redistribute_reference.corrected_survivals(confidences[sources], odds)
    place = torch.arange(1, survivals.shape[1] + 1, device=sources.device)
    survivals = torch.where(place < limits[:, None], survivals, -1.0).flatten()
    order = survivals.sort(descending=True, stable=True).indices[: num_rows - sources.shape[0]]
    extra = torch.zeros_like(survivals, dtype=torch.int32).index_fill_(0, order, 1)
    return 1 + extra.view(sources.shape[0], -1).sum(1, dtype=torch.int32)


def _prefill(seqs: int, rows: int) -> Case:
    def make(g: torch.Generator) -> tuple[Any, ...]:
        counts = torch.full((seqs,), rows // seqs)
        cu = _sums(counts)
        seq = torch.repeat_interleave(torch.arange(seqs), counts)
        positions = (torch.arange(rows) - cu[seq] + 1000).int()
        return positions, seq.int(), cu, _random(g, 300, seqs), _random(g, 100000, seqs, MAX_BLOCKS)

    return _case(
        "kv_index.prefill_metadata",
        f"{seqs} sequences, {rows} rows",
        rows * (8 + 8 * 5 + 4 * WINDOW + 2 * 20) + seqs * 16 * (WINDOW - 1),
        make,
        lambda *args: prefill_metadata(*args, **LISTS),
        lambda *args: prefill_metadata_reference.run(*args, None, *LISTS.values()),
    )
