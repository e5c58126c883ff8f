"""Bounded replay: decoder layers run a prompt's newest tokens, whose windows begin with the first of them.

The rules are written down here once more, token by token, and compared with the index lists of the forward;
compact and mask mode, whole prompts and chunks are compared bit by bit; logits of an independent
implementation say that the rules are the right ones.
"""

from __future__ import annotations

import dataclasses
import functools
import random

import pytest
import torch
from torch import Tensor

from deepinfer.config import ReplayMode
from deepinfer.models.deepseek_v41 import needed_rows
from deepinfer.models.deepseek_v41.rows import RowSet, rotary_tables
from tests.models.checks import NEAR_TIE
from tests.support.compare import assert_same_bits, relative_rms
from tests.support.forward_harness import ForwardHarness, TestSequence
from tests.support.golden import golden
from tests.support.models import fold_map, load_backbone, load_config

WINDOW = 128
BACKTRACKING = 6
RING = WINDOW + BACKTRACKING
KEEP = 140
STEPS = 3
# One below, at and above: a window, a ring, K, two blocks, and K behind a group of each ratio.
LENGTHS = [n + side for n in (128, RING, KEEP, 256, 260, 268) for side in (-1, 0, 1)] + [262, 270]
OFF, MASK, COMPACT = ReplayMode.OFF, ReplayMode.MASK, ReplayMode.COMPACT


def prompt_of(length: int) -> list[int]:
    return [0, *random.Random(length).choices(range(100, 4000), k=length - 1)]


def harness_of(replay: ReplayMode, name: str = "tiny-quant", *, skip: bool = True) -> ForwardHarness:
    model = dataclasses.replace(load_backbone(name), skip_rows=skip)
    return ForwardHarness(model, fold_map(name), num_seqs=4, replay=replay)


@dataclasses.dataclass(frozen=True)
class Run:
    """A prompt and a few greedy tokens.

    Attributes:
        logits: [outputs of the prompt + STEPS, vocab].
        kv_rows, query_rows: [layers] rows of the prefill.
    """

    harness: ForwardHarness
    seq: TestSequence
    logits: Tensor
    kv_rows: list[int]
    query_rows: list[int]


def run(
    replay: ReplayMode,
    length: int,
    *,
    keep: int = KEEP,
    chunk: int | None = None,
    outputs: str = "last",
    skip: bool = True,
    name: str = "tiny-quant",
    steps: int = STEPS,
) -> Run:
    harness = harness_of(replay, name, skip=skip)
    counters = harness.model.counters
    seq = harness.add(prompt_of(length), max(0, length - keep))
    counters.reset()
    parts = [harness.prefill(seq, chunk, outputs)]
    counted = list(counters.kv_rows), list(counters.query_rows)
    for _ in range(steps):
        parts.append(harness.decode([seq], [int(parts[-1][-1].argmax())]))
    return Run(harness, seq, torch.cat(parts), *counted)


# The rules, token by token


CHUNKS = [
    (0, 300, 160),  # lo inside the chunk
    (0, 300, 299),
    (256, 300, 160),  # in a chunk before
    (256, 300, 255),
    (256, 300, 256),
    (256, 300, 257),
    (0, 128, 160),  # in a later one
    (130, 140, 0),
]
DECODE_ROWS = [(296, 300, 100), (296, 300, 173), (299, 300, 290), (130, 131, 0)]


@pytest.mark.parametrize(
    ("start", "stop", "lo", "is_prefill"),
    [(*chunk, True) for chunk in CHUNKS] + [(*rows, False) for rows in DECODE_ROWS],
)
def test_visible_positions_and_ring_writes(start: int, stop: int, lo: int, is_prefill: bool) -> None:
    """A query at p sees [max(p - 127, lo, 0), p], nothing if p < lo; rings receive the last R, p >= lo."""
    harness = harness_of(MASK)
    seqs = [harness.add(prompt_of(300), lo), harness.add(prompt_of(300), 0)]
    for seq in seqs:
        seq.computed = start
    batch = harness.batch([(seq, stop - start) for seq in seqs], "none", decode=not is_prefill)
    rows = RowSet.whole(batch, rotary_tables(load_config("tiny-quant"))).bounded(batch.window_starts)
    if is_prefill:
        origins = rows.line_index(WINDOW)[1][rows.row_seq.long()].tolist()
        lists = rows.window_in_line(WINDOW, rows).tolist()
        seen = [[r - origin for r in row if r >= 0] for row, origin in zip(lists, origins, strict=True)]
    else:
        seen = [sorted(r for r in row if r >= 0) for row in rows.window_in_ring(WINDOW, RING).tolist()]
    written = rows.ring_index(RING).tolist()
    for row, (p, owner) in enumerate(zip(batch.positions.tolist(), batch.row_seq.tolist(), strict=True)):
        first = lo if owner == 0 else 0
        slot = seqs[owner].slot
        visible = range(max(p - WINDOW + 1, first, 0), p + 1)
        expected = list(visible) if is_prefill else sorted(slot * RING + t % RING for t in visible)
        assert seen[row] == expected, f"{p=} {first=}"
        is_written = p >= first and p >= stop - RING
        assert written[row] == (slot * RING + p % RING if is_written else -1), f"{p=} {first=}"


@pytest.mark.parametrize("keep", [1, 134, 140])
def test_kept_rows(keep: int) -> None:
    """A chunk at q0 drops its first clamp(n - K - q0, 0, q - 1) rows; what nobody reads goes as well."""
    total = 300
    for chunk in (1, 100, 127, 128, 141, 300):
        for start in range(0, total, chunk):
            harness = harness_of(COMPACT)
            seq = harness.add(prompt_of(total), total - keep)
            seq.computed = start
            rows = min(chunk, total - start)
            batch = harness.batch([(seq, rows)], "last")
            for skip in (True, False):
                plan = needed_rows.NeededRows.build(batch, 8, 4, WINDOW, is_cut=True, skip=skip)
                kept = range(rows) if plan.kv_places is None else plan.kv_places.tolist()
                clip = min(max(total - keep - start, 0), rows - 1)
                expected = list(range(clip, rows))
                if skip and start + rows <= total - keep:
                    expected = []  # the placeholder: nobody reads it
                assert list(kept) == expected, f"{chunk=} {start=} {skip=}"


# Equalities of the whole


@pytest.mark.parametrize("length", LENGTHS)
def test_compact_is_mask(length: int) -> None:
    """All kept rows and the tokens behind them, bit by bit; compact removes rows, mask removes none."""
    mask = run(MASK, length, outputs="kept", steps=1)
    compact = run(COMPACT, length, outputs="kept", steps=1)
    assert_same_bits(compact.logits, mask.logits, "logits of the kept rows and behind them")
    kept = min(length, KEEP)
    layers, first = load_config("tiny-quant").num_hidden_layers, 4
    assert mask.kv_rows == [length] * layers
    assert mask.query_rows == [length] * (layers - 1) + [kept]
    assert compact.kv_rows == [length] * first + [kept] * (layers - first)
    assert compact.query_rows == [length] * first + [kept] * (layers - first)
    if length in (139, 140, 141, 256):
        exact = run(OFF, length, steps=0).logits[0]
        assert torch.equal(exact, mask.logits[kept - 1]) == (length <= KEEP), "only long prompts differ"


@functools.cache
def whole_run(length: int) -> Run:
    return run(COMPACT, length)


@pytest.mark.parametrize(
    ("length", "chunk"),
    [(145, 1), (268, 7)]
    + [(length, chunk) for length in (140, 141, 268) for chunk in (127, 128, 129)]
    + [(length, length - KEEP + side) for length in (260, 300) for side in (-1, 0, 1)],  # borders around lo
)
def test_chunks_are_the_whole(length: int, chunk: int) -> None:
    whole, parts = whole_run(length), run(COMPACT, length, chunk=chunk)
    assert_same_bits(parts.logits, whole.logits, "newest token and decode steps")
    assert parts.kv_rows == whole.kv_rows and parts.query_rows == whole.query_rows
    assert_same_state(parts, whole)


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize(("length", "chunk"), [(700, None), (700, 100), (1500, 256)])
def test_rows_of_every_layer(length: int, chunk: int | None, skip: bool) -> None:
    """Long prompts: K rows in the decoder where an exact prefill computes hundreds."""
    compact = run(COMPACT, length, chunk=chunk, skip=skip)
    assert_same_bits(compact.logits, whole_run(length).logits, "logits")
    chunks_before = (length - KEEP) // (chunk or length)  # those keep a placeholder when nothing is skipped
    kept = KEEP + (0 if skip else chunks_before)
    last = WINDOW if skip else kept
    assert compact.kv_rows == [length] * 4 + [kept] * 3 + [last]
    assert compact.query_rows == [length] * 4 + [kept] * 2 + [last] + [1]
    assert chunks_before == {None: 0, 100: 5, 256: 5}[chunk]


def test_long_prompts_in_mask_mode_and_off() -> None:
    assert_same_bits(run(MASK, 700).logits, whole_run(700).logits, "logits")
    assert run(OFF, 700, steps=0).kv_rows == [700] * 4 + [509, 382, 255, 128]


def ring_records(run: Run, layer_id: int) -> dict[int, bytes]:
    """Position -> record, of the newest R positions in a window ring."""
    ring = run.harness.caches.window(layer_id)[run.seq.slot]
    newest = run.seq.computed
    return {p: bytes(ring[p % RING].numpy()) for p in range(max(0, newest - RING), newest)}


def assert_same_state(actual: Run, expected: Run) -> None:
    """Rings of all layers and the compressed entries of all blocks."""
    for layer_id in range(8):
        assert ring_records(actual, layer_id) == ring_records(expected, layer_id), f"{layer_id=}"
    blocks = [run.harness.caches.blocks[run.seq.blocks] for run in (actual, expected)]
    assert torch.equal(*blocks)


@pytest.mark.parametrize("replay", [MASK, COMPACT])
@pytest.mark.parametrize("chunk", [None, 129])
def test_entries_of_all_rows_and_rings_of_kept_rows(replay: ReplayMode, chunk: int | None) -> None:
    """Encoder and compressed entries are exact; decoder rings hold nothing from before lo."""
    length, keep = 300, 134
    exact = run(OFF, length, chunk=chunk, steps=0)
    cut = run(replay, length, keep=keep, chunk=chunk, steps=0)
    for layer_id in range(4):
        assert ring_records(cut, layer_id) == ring_records(exact, layer_id)
    assert torch.equal(
        cut.harness.caches.blocks[cut.seq.blocks], exact.harness.caches.blocks[exact.seq.blocks]
    )
    short = run(replay, length, keep=5, chunk=chunk, steps=0)  # fewer than a ring has records
    nobody = b"\xff" * 528  # what the pools start with
    for layer_id in range(4, 8):
        written = {p for p, record in ring_records(short, layer_id).items() if record != nobody}
        assert written == set(range(length - 5, length)), f"{layer_id=}"


def test_a_prompt_that_is_kept_whole_is_exact() -> None:
    for length in (1, 7, 128, 139, 140):
        assert_same_bits(run(COMPACT, length).logits, run(OFF, length).logits, f"{length=}")


def test_mixed_batch() -> None:
    """Cut and whole prompts, chunks before and behind lo, in one step; each row as alone."""
    lengths, name = (300, 40, 270, 139), "v41-tiny"
    harness = harness_of(COMPACT, name)
    seqs = [harness.add(prompt_of(length), max(0, length - KEEP)) for length in lengths]
    for sizes in ((128, 10, 131, 139), (172, 30, 139, 0)):
        work = [(seq, size) for seq, size in zip(seqs, sizes, strict=True) if size]
        logits = harness.step(work, want_features=True)
        if sizes[3]:
            fourth = logits
    together = torch.cat([logits, fourth])
    alone = [run(COMPACT, length, name=name, steps=0).logits for length in lengths]
    assert_same_bits(together, torch.cat(alone), "newest tokens")
    behind = harness.decode(seqs, [5, 6, 7, 8])
    for row, (length, token) in enumerate(zip(lengths, (5, 6, 7, 8), strict=True)):
        single = run(COMPACT, length, name=name, steps=0)
        assert_same_bits(single.harness.decode([single.seq], [token]), behind[row : row + 1], f"{length=}")


def test_features_cover_the_drafters_context() -> None:
    found = []
    for replay in (MASK, COMPACT):
        harness = harness_of(replay)
        seq = harness.add(prompt_of(300), 300 - 134)
        harness.step([(seq, 300)], want_features=True)
        output, batch = harness.last_output, harness.last_batch
        places = {int(batch.positions[row]): i for i, row in enumerate(output.feature_rows.tolist())}
        found.append(output.features[[places[p] for p in range(300 - WINDOW, 300)]])
    assert_same_bits(*found, "features of the drafter's context")


def test_tokens_behind_the_prompt_prefill_as_they_decode() -> None:
    """Recomputing prompt and outputs with the lo of the prompt gives the bits of the decode steps."""
    length, steps = 200, 70  # so many that the recomputation's own K would begin elsewhere
    first = run(COMPACT, length, steps=steps)
    harness = first.harness
    again = harness.add(first.seq.tokens, first.seq.window_start)
    logits = harness.prefill(again, chunk=100)
    assert_same_bits(logits[-1:], first.logits[-1:], "newest token")
    other = harness.add(first.seq.tokens, len(first.seq.tokens) - KEEP)
    assert not torch.equal(harness.prefill(other)[-1:], logits[-1:]), "its own K gives another result"


# Another implementation


@pytest.mark.parametrize("replay", [MASK, COMPACT])
@pytest.mark.parametrize(
    ("prompt", "rows"), [("len300", 128), ("len300", 256), ("len1000", 128), ("len1000", 256)]
)
def test_golden(prompt: str, rows: int, replay: ReplayMode) -> None:
    data = golden("tiny-quant")
    tokens, key = data.prompts[prompt], f"{prompt}/rows{rows}"
    expected = data.replay.about[key]
    harness = harness_of(replay)
    seq = harness.add(tokens, len(tokens) - rows)
    logits = harness.prefill(seq)
    error = float(relative_rms(logits, data.replay[f"{key}/last_logits"][None]))
    exact = harness_of(OFF)
    distance = float(relative_rms(exact.prefill(exact.add(tokens)), logits))
    assert error < 5e-3 and error < 0.7 * distance, f"{error=:.1e}; the exact result is {distance:.1e} away"
    mine, margins = harness.greedy([seq], len(expected["token_ids"]), logits)
    for step, (token, wanted) in enumerate(zip(mine[0], expected["token_ids"], strict=True)):
        if token != wanted:
            assert expected["margins"][step] < NEAR_TIE and margins[0][step] < 2 * NEAR_TIE, f"{step=}"
            break


# Mutants


def one_later(self: RowSet, index: Tensor) -> Tensor:
    if self._row_starts is None:
        return index
    place = torch.arange(1 - index.shape[1], 1)
    return torch.where(self.positions[:, None] + place < self._row_starts[:, None] + 1, -1, index)


def one_earlier(self: RowSet, index: Tensor) -> Tensor:
    if self._row_starts is None:
        return index
    place = torch.arange(1 - index.shape[1], 1)
    return torch.where(self.positions[:, None] + place < self._row_starts[:, None] - 1, -1, index)


def no_bound(self: RowSet, index: Tensor) -> Tensor:
    return index


@pytest.mark.parametrize("mutant", [one_later, one_earlier, no_bound])
def test_wrong_windows_show(monkeypatch: pytest.MonkeyPatch, mutant) -> None:
    right = whole_run(300).logits
    monkeypatch.setattr(RowSet, "_bound", mutant)
    with pytest.raises(AssertionError):
        test_visible_positions_and_ring_writes(0, 300, 160, True)
    assert not torch.equal(run(COMPACT, 300).logits, right)


def test_a_placeholder_that_is_read_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The chunk before lo keeps its last row; a next chunk that sees it is off."""
    lo, chunk = 160, 160
    right = run(COMPACT, 300, keep=300 - lo, chunk=chunk, skip=False).logits
    monkeypatch.setattr(RowSet, "_bound", one_earlier)
    assert not torch.equal(run(COMPACT, 300, keep=300 - lo, chunk=chunk, skip=False).logits, right)


def test_wrong_ring_writes_show(monkeypatch: pytest.MonkeyPatch) -> None:
    def every_row(self: RowSet, ring: int) -> Tensor:
        return torch.where(self.following < ring, self.slots * ring + self.positions % ring, -1)

    monkeypatch.setattr(RowSet, "ring_index", every_row)
    with pytest.raises(AssertionError):
        test_entries_of_all_rows_and_rings_of_kept_rows(MASK, None)
    with pytest.raises(AssertionError):
        test_visible_positions_and_ring_writes(256, 300, 257, True)
