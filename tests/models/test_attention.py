"""Attention over the pools: whole = chunked = decoded = in a batch; what it reads and what it must not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from deepinfer.models.deepseek_v41 import indexer
from deepinfer.models.deepseek_v41.rows import RowSet
from tests.models.attention_stack import MAX_BACKTRACKING, AttentionStack, Sequence
from tests.models.dense_attention import dense_outputs
from tests.support.compare import assert_same_bits

MODES = ["float32", "w8a8", "plain"]


@pytest.mark.parametrize("arithmetic", ["plain", "float32"])
@pytest.mark.parametrize("length", [1, 2, 33, 131])
def test_equals_dense_attention(arithmetic: str, length: int) -> None:
    """The definition, written out densely in float64. 131 reaches selections and candidate blocks."""
    stack = AttentionStack(arithmetic)
    seq = stack.sequence(length)
    outputs = stack.run(seq, length, is_prefill=True)
    expected = dense_outputs(stack.attentions, stack.config, seq.inputs, arithmetic != "plain")
    error = (outputs.double() - expected).norm(dim=-1) / expected.norm(dim=-1)
    if arithmetic == "plain":
        assert error.max() < 1e-5, f"{error.max()=}"
    else:  # a value near the middle of two codes may round differently in float32 and float64
        assert error.median() < 1e-5 and error.quantile(0.95) < 0.01, f"{error.median()=} {error.max()=}"


@pytest.mark.parametrize("arithmetic", MODES)
@pytest.mark.parametrize("chunk", [7, 31, 32, 37, 38, 39, 64, 127, 128, 129, 130])
def test_chunked_equals_whole(arithmetic: str, chunk: int) -> None:
    """Any chunking gives the same bits; 38 is the length of the ring."""
    stack = AttentionStack(arithmetic)
    seq = stack.sequence(140)
    whole = stack.run(seq, 140, is_prefill=True)
    assert_same_bits(stack.run(stack.adopt(seq.inputs), chunk, is_prefill=True), whole, f"{chunk=}")


@pytest.mark.parametrize("arithmetic", MODES)
@pytest.mark.parametrize("rows", [1, 2, 3, MAX_BACKTRACKING + 1])
def test_decode_equals_prefill(arithmetic: str, rows: int) -> None:
    """Decode steps of a few rows read the ring itself and give the bits of prefill."""
    stack = AttentionStack(arithmetic)
    seq = stack.sequence(140)
    whole = stack.run(seq, 140, is_prefill=True)
    again = stack.adopt(seq.inputs)
    start = stack.run(again, 21, 21, is_prefill=True)
    rest = stack.run(again, rows, is_prefill=False)
    assert_same_bits(torch.cat([start, rest], dim=1), whole, f"{rows=}")


@pytest.mark.parametrize("arithmetic", MODES)
def test_batch_equals_alone(arithmetic: str) -> None:
    """Prefill and decode of mixed lengths in one step give each sequence the bits that it has alone."""
    stack = AttentionStack(arithmetic)
    lengths = [1, 140, 6, 39, 64, 130]
    seqs = [stack.sequence(length + 9) for length in lengths]
    first = stack.step(list(zip(seqs, lengths, strict=True)), is_prefill=True)
    decoded = [[] for _ in seqs]
    for counts in ([1] * 6, [1, 3, 2, 7, 1, 1], [1, 1, 4, 1, 2, 6]):
        for parts, part in zip(
            decoded, stack.step(list(zip(seqs, counts, strict=True)), is_prefill=False), strict=True
        ):
            parts.append(part)
    for seq, start, parts in zip(seqs, first, decoded, strict=True):
        single = AttentionStack(arithmetic)
        alone = single.run(single.adopt(seq.inputs), 1000, is_prefill=True)
        together = torch.cat([start, *parts], dim=1)
        assert_same_bits(together, alone[:, : together.shape[1]], f"{len(seq.blocks)=}")


@pytest.mark.parametrize("arithmetic", MODES)
@pytest.mark.parametrize("accepted", [1, 2, 3, 4, 5, 6])
def test_rejected_drafts_leave_no_trace(arithmetic: str, accepted: int) -> None:
    """Steps of six rows of which only the first ones stay: what is decoded later is as if never drafted."""
    stack = AttentionStack(arithmetic)
    seq = stack.sequence(120)
    whole = stack.run(seq, 120, is_prefill=True)
    drafting = stack.adopt(seq.inputs.clone())
    stack.run(drafting, 100, 61, is_prefill=True)
    while drafting.num_done + 6 <= 120:
        start = drafting.num_done
        drafting.inputs[:, start + accepted : start + 6] = torch.randn_like(
            drafting.inputs[:, start + accepted : start + 6]
        )
        (outputs,) = stack.step([(drafting, 6)], is_prefill=False)
        assert_same_bits(outputs[:, :accepted], whole[:, start : start + accepted], f"{start=}")
        drafting.num_done = start + accepted
        drafting.inputs[:, start:] = seq.inputs[:, start:]


def test_other_blocks_and_slots_are_not_read(seed: int) -> None:
    """Random bytes in everything that the sequence does not own, and in entries it cannot see yet."""
    stack = AttentionStack("float32")
    seq = stack.sequence(140)
    whole = stack.run(seq, 140, is_prefill=True)
    seq = stack.adopt(seq.inputs)
    stack.run(seq, 50, 101, is_prefill=True)
    for pool, owned in ((stack.caches.blocks, seq.blocks), (stack.caches.slots, [seq.slot])):
        for number in range(pool.shape[0]):
            if number not in owned:
                pool[number] = torch.randint(0, 256, pool.shape[1:], dtype=torch.uint8)
    for section in stack.layout.paged:
        view = stack.caches.paged(section.layer_id)
        for number in range(101 // section.ratio, 140 // section.ratio):
            place = seq.blocks[number // section.entries], number % section.entries
            for field in (view.main, view.codes, view.scales):
                field[place] = torch.randint(0, 256, field[place].shape, dtype=torch.uint8)
    assert_same_bits(stack.run(seq, 1, is_prefill=False), whole[:, 101:])


def _flipped(flip, arithmetic: str = "float32") -> tuple[Tensor, Tensor]:
    """Outputs [layers, hidden] of position 100, with and without a change to the caches before it."""
    stack = AttentionStack(arithmetic)
    seq = stack.sequence(101)
    stack.run(seq, 101, 100, is_prefill=True)
    before = stack.caches.blocks.clone(), stack.caches.slots.clone()
    (expected,) = stack.step([(seq, 1)], is_prefill=False)
    stack.caches.blocks.copy_(before[0])
    stack.caches.slots.copy_(before[1])
    seq.num_done = 100
    flip(stack, seq)
    (outputs,) = stack.step([(seq, 1)], is_prefill=False)
    return outputs[:, 0], expected[:, 0]


@pytest.mark.parametrize("layer_id", range(8))
@pytest.mark.parametrize("field", [5, 512])
def test_window_bytes_are_read(layer_id: int, field: int) -> None:
    """One changed byte (a code, a scale) of the oldest record in the window changes that layer's output."""

    def flip(stack: AttentionStack, seq: Sequence) -> None:
        ring = stack.caches.window(layer_id)
        ring[seq.slot, (100 - 31) % ring.shape[1], field] ^= 0x02

    outputs, expected = _flipped(flip)
    changed = (outputs != expected).any(1)
    assert changed.tolist() == [number == layer_id for number in range(8)]


@pytest.mark.parametrize("age", [32, 36])
def test_records_behind_the_window_are_not_read(age: int) -> None:
    """The ring also holds older positions, for steps that are taken back."""

    def spoil(stack: AttentionStack, seq: Sequence) -> None:
        for layer_id in range(8):
            ring = stack.caches.window(layer_id)
            ring[seq.slot, (100 - age) % ring.shape[1]] = 0xFF

    assert_same_bits(*_flipped(spoil))


@pytest.mark.parametrize(("source", "readers"), [(1, [1, 2]), (3, [3]), (4, [4, 5, 6, 7])])
@pytest.mark.parametrize("field", [3, 256])
def test_entry_bytes_are_read(source: int, readers: list[int], field: int) -> None:
    """Changed main KV of all entries changes the layers that read them, and no other."""

    def flip(stack: AttentionStack, seq: Sequence) -> None:
        stack.caches.main(source)[seq.blocks[0], :, field] ^= 0x01

    outputs, expected = _flipped(flip)
    assert (outputs != expected).any(1).nonzero().flatten().tolist() == readers


@pytest.mark.parametrize(("source", "readers"), [(1, [1, 2]), (3, [3]), (4, [4, 5, 6, 7])])
def test_index_keys_are_read(source: int, readers: list[int]) -> None:
    """With their index keys negated other entries are chosen, in every layer that uses the selection."""

    def negate(stack: AttentionStack, seq: Sequence) -> None:
        stack.caches.index_codes(source)[seq.blocks[0]] ^= 0x88

    outputs, expected = _flipped(negate)
    assert (outputs != expected).any(1).nonzero().flatten().tolist() == readers


@pytest.mark.parametrize("source", [1, 3])
def test_open_groups_are_read_from_the_ring(source: int) -> None:
    """Position 101 ends the group that position 100 opened in a step before."""
    stack = AttentionStack("float32")
    seq = stack.sequence(102)
    stack.run(seq, 101, 101, is_prefill=True)
    ring = stack.caches.compression(source)
    ring[seq.slot, 100 % ring.shape[1], 1] += 1.0
    stack.step([(seq, 1)], is_prefill=False)
    changed = stack.caches.main(source)[seq.blocks[0], 50].clone()
    other = stack.adopt(seq.inputs)
    stack.run(other, 102, is_prefill=True)
    assert not torch.equal(changed, stack.caches.main(source)[other.blocks[0], 50])


@pytest.mark.parametrize(("kept_rows", "query_rows"), [(60, 29), (40, 9), (32, 1), (0, 0)])
def test_trailing_rows_alone(kept_rows: int, query_rows: int) -> None:
    """Entries for all rows, window KV for the last ones, queries for fewer: the bits of computing all."""
    stack = AttentionStack("float32")
    lengths = [140, 90]
    full = [stack.sequence(length) for length in lengths]
    expected = [stack.run(seq, 70, is_prefill=True) for seq in full]
    seqs = [stack.adopt(seq.inputs) for seq in full]
    # The second sequence keeps no row at all in the step below.
    stack.step([(seqs[0], 70), (seqs[1], 80)], is_prefill=True)
    chunks = [(seqs[0], 70), (seqs[1], 10)]
    rows = RowSet.whole(stack.batch(chunks, True), stack.rotary)
    kept, asked = torch.arange(70 - kept_rows, 70), torch.arange(kept_rows - query_rows, kept_rows)
    kept_set = rows.take(kept)
    queries = kept_set.take(asked)
    selection = None
    for layer_id in (4, 5, 6, 7):
        attention = stack.attentions[layer_id]
        x = torch.cat([seq.inputs[layer_id, seq.num_done : seq.num_done + n] for seq, n in chunks])
        attention.store_entries(x, rows, stack.caches)
        keys = attention.store_window(x[kept], kept_set, stack.caches)
        output, selection = attention.forward(x[kept][asked], queries, keys, stack.caches, selection)
        assert_same_bits(output, expected[0][layer_id, 140 - query_rows :], f"{layer_id=}")


def recorded(scores: Callable[..., Tensor], shapes: list[tuple[int, int]]) -> Callable[..., Tensor]:
    """An operator that notes the shapes of its results."""

    def run(*args: Any) -> Tensor:
        shapes.append(tuple((result := scores(*args)).shape))
        return result

    return run


def test_selection_narrows_with_its_rows() -> None:
    """A selection handed on for fewer rows is the part of the whole one."""
    stack = AttentionStack("float32")
    seq = stack.sequence(140)
    stack.run(seq, 140, is_prefill=True)
    whole, places = stack.selections[7], torch.tensor([3, 77, 139])
    part = whole.take(places)
    assert_same_bits(part.entries, whole.entries[places])
    assert_same_bits(part.slots, whole.slots[places])
    assert_same_bits(part.candidates, whole.candidates[places])


def test_scores_are_worked_off_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bound on the bytes of scores changes how many rows are scored at once, and nothing else."""
    shapes: list[tuple[int, int]] = []
    for name in ("index_scores", "candidate_scores"):
        monkeypatch.setattr(indexer, name, recorded(getattr(indexer, name), shapes))
    stack = AttentionStack("float32")
    whole = stack.sequence(140)
    parts = stack.adopt(whole.inputs)
    expected = stack.run(whole, 140, is_prefill=True)
    at_once, shapes[:] = list(shapes), []
    stack.caches.score_bytes = 30000
    assert_same_bits(stack.run(parts, 140, is_prefill=True), expected)
    assert {width for _, width in at_once} == {32, 96, 160}  # candidates, entries of two tokens, of one
    in_parts = [
        (min(step, 140 - row), width)
        for rows, width in at_once
        for step in [30000 // (4 * width)]
        for row in range(0, rows, step)
    ]
    assert all(rows == 140 for rows, _ in at_once) and shapes == in_parts


def test_decode_work_does_not_grow_with_the_context() -> None:
    """At 4,096 tokens a decode step computes one row per layer; it reads a window, a selection, the keys.

    The last indexer reads the keys of its 4 candidate blocks of 8 alone.
    """
    stack = AttentionStack("float32", num_blocks=40)
    seq = stack.adopt(torch.randn(8, 4097, stack.config.hidden_size))
    seq.num_done = 4096
    stack.caches.blocks.zero_()
    stack.caches.slots.zero_()
    stack.caches.counters.reset()
    stack.step([(seq, 1)], is_prefill=False)
    counters = stack.caches.counters
    assert counters.query_rows == counters.window_records_written == 8
    assert counters.window_records_read == 8 * 32
    assert counters.main_records_read == 7 * 16
    keys = 2 * 2048 + 4097 + 4 * 8
    assert counters.index_keys_read == keys
    assert counters.entry_rows == 3
    assert counters.bytes_read == 8 * 32 * 528 + 7 * 16 * 288 + keys * 68
