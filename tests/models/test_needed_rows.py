"""Which rows decoder layers compute: the formula against a walk through all dependencies."""

from __future__ import annotations

import pytest
import torch

from deepinfer.models.deepseek_v41.needed_rows import NeededRows, deepest_layers
from deepinfer.runtime.batch import Batch


def make_batch(
    chunks: list[tuple[int, int, int]],
    *,
    keep_all: tuple[int, ...] = (),
    outputs: list[int] | None = None,
    decode: bool = False,
) -> Batch:
    """Rows `start ... stop - 1` of sequences with `total` known tokens; what is not read stays empty."""
    rows = [(seq, p) for seq, (start, stop, _) in enumerate(chunks) for p in range(start, stop)]
    newest = [row for row, (seq, p) in enumerate(rows) if p == chunks[seq][2] - 1 or seq in keep_all]
    empty = torch.empty(0, dtype=torch.int32)

    def ints(values) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32)

    return Batch(
        input_ids=ints([0] * len(rows)),
        positions=ints([p for _, p in rows]),
        row_seq=ints([seq for seq, _ in rows]),
        ngram_ids=empty,
        cu_seqlens_q=empty,
        seqlens_k=ints([stop for _, stop, _ in chunks]),
        state_slots=empty,
        block_tables=empty,
        total_lens=ints([total for _, _, total in chunks]),
        keep_all=ints([int(seq in keep_all) for seq in range(len(chunks))]),
        window_starts=ints([0] * len(chunks)),
        output_rows=ints(newest if outputs is None else outputs),
        max_seqlen_k=max(stop for _, stop, _ in chunks),
        is_prefill=not decode,
    )


def needed_inputs(total: int, first: int, last: int, window: int) -> list[set[int]]:
    """Positions whose input each decoder layer needs, by following every read back."""
    inputs: list[set[int]] = [set() for _ in range(last + 1)]
    outputs: list[set[int]] = [set() for _ in range(last + 1)]
    work = [("output", last, total - 1)]
    for layer in range(first, last + 1):  # windows of tokens that are still to come
        for query in range(total, total + window):
            work += [
                ("input", layer, p) for p in range(max(0, query - window + 1), min(query, total - 1) + 1)
            ]
    while work:
        what, layer, position = work.pop()
        known = inputs if what == "input" else outputs
        if position in known[layer]:
            continue
        known[layer].add(position)
        if what == "output":
            work += [("input", layer, p) for p in range(max(0, position - window + 1), position + 1)]
        elif layer > first:
            work.append(("output", layer - 1, position))
    return inputs


@pytest.mark.parametrize("window", [1, 2, 3, 8])
@pytest.mark.parametrize(("first", "last"), [(0, 0), (1, 4), (2, 3), (4, 7)])
def test_formula_is_the_closure_of_all_reads(first: int, last: int, window: int) -> None:
    for total in (1, 2, window, window + 1, 3 * window + 5, 60):
        batch = make_batch([(0, total, total)])
        deepest = deepest_layers(batch, last, window)
        for layer, needed in enumerate(needed_inputs(total, first, last, window)):
            if layer >= first:
                computed = set((deepest >= layer).nonzero().flatten().tolist())
                assert computed >= needed, f"{total=} {layer=}: rows {sorted(needed - computed)} are missing"
                if window > 1:  # a window of one token keeps a few rows more than it has to
                    assert computed == needed, f"{total=} {layer=}"


def walk(batch: Batch, needed: NeededRows, first: int, num_layers: int) -> tuple[list[list[int]], list[int]]:
    """Rows of the batch that each decoder layer makes window KV for, and those that are left at the end."""
    rows = torch.arange(batch.num_rows)
    rows = rows if needed.kv_places is None else rows[needed.kv_places]
    kv = []
    for layer in range(first, num_layers):
        kv.append(rows.tolist())
        places = needed.query_places[layer]
        rows = rows if places is None else rows[places]
    return kv, rows.tolist()


@pytest.mark.parametrize("chunk", [1, 3, 10, 100])
def test_chunks_of_several_sequences(chunk: int) -> None:
    """Every chunking leaves each layer the rows that the whole prompts leave it; outputs come last."""
    first, num_layers, window, totals = 3, 7, 4, (37, 5, 60)
    seen: list[set[tuple[int, int]]] = [set() for _ in range(num_layers)]
    for start in range(0, 60, chunk):
        spans = [(min(start, n), min(start + chunk, n), n) for n in totals]
        batch = make_batch(spans, keep_all=(1,))
        needed = NeededRows.build(batch, num_layers, first, window)
        kv, final = walk(batch, needed, first, num_layers)
        assert final == batch.output_rows.tolist()
        for layer, rows in enumerate(kv, start=first):
            seen[layer] |= {(int(batch.row_seq[row]), int(batch.positions[row])) for row in rows}
    for layer in range(first, num_layers):
        for seq, total in enumerate(totals):
            expected = (
                set(range(total)) if seq == 1 else needed_inputs(total, first, num_layers - 1, window)[layer]
            )
            assert {p for s, p in seen[layer] if s == seq} == expected, f"{layer=} {seq=}"


def test_nothing_narrows_when_all_is_needed() -> None:
    batch = make_batch([(0, 20, 20), (0, 9, 9)], keep_all=(0, 1))
    needed = NeededRows.build(batch, 6, 2, 128)
    assert needed.kv_places is None and needed.query_places == (None,) * 6


def test_a_chunk_far_from_the_end_has_no_decoder_rows() -> None:
    needed = NeededRows.build(make_batch([(0, 100, 5000)]), 8, 4, 128)
    assert needed.kv_places.shape == (0,)
    assert all(places is None for places in needed.query_places)


@pytest.mark.parametrize(("num_rows", "outputs"), [(1, None), (1, []), (6, None), (6, [])])
def test_decode_keeps_every_row(num_rows: int, outputs: list[int] | None) -> None:
    batch = make_batch([(500, 500 + num_rows, 500 + num_rows)], outputs=outputs, decode=True)
    needed = NeededRows.build(batch, 8, 4, 128)
    assert needed.kv_places is None and needed.query_places[:7] == (None,) * 7
    assert walk(batch, needed, 4, 8)[1] == batch.output_rows.tolist()


def test_an_output_row_that_is_skipped_is_our_mistake() -> None:
    with pytest.raises(AssertionError, match="output row"):
        NeededRows.build(make_batch([(0, 600, 600)], outputs=[3]), 8, 4, 8)
