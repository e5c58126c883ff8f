"""The forward reads its history from the pools alone, and only what belongs to the sequence."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor

from deepinfer.runtime.caches import Caches
from tests.support.compare import assert_same_bits
from tests.support.forward_harness import BLOCK_SIZE, ForwardHarness, TestSequence
from tests.support.golden import golden
from tests.support.models import load_config, make_harness
from tests.support.observe import Record, observe

NAME = "tiny-quant"
LENGTH = 201  # computed tokens; odd, so a group of two is open


def prefilled() -> tuple[ForwardHarness, TestSequence]:
    """A sequence of which all but the newest token are computed."""
    harness = make_harness(NAME, num_seqs=3)
    seq = harness.add(golden(NAME).prompts["len300"][: LENGTH + 1])
    harness.prefill(seq, limit=LENGTH)
    return harness, seq


def newest_logits(harness: ForwardHarness, seq: TestSequence) -> Tensor:
    return harness.step([(seq, 1)], decode=True)[0]


@functools.cache
def clean_run() -> tuple[Tensor, Record]:
    """Logits of the newest token over untouched pools, and what its step did."""
    harness, seq = prefilled()
    harness.model, record = observe(harness.model)
    return newest_logits(harness, seq), record


def window_record(caches: Caches, seq: TestSequence, layer_id: int) -> Tensor:
    ring = caches.window(layer_id)
    return ring[seq.slot, (LENGTH - 100) % ring.shape[1]]


def selected_record(caches: Caches, seq: TestSequence, layer_id: int) -> Tensor:
    view = caches.paged(layer_id)
    entry = int(clean_run()[1][f"selected.layer{layer_id}"][0, 7])
    return view.main[seq.blocks[entry // view.section.entries], entry % view.section.entries]


@pytest.mark.parametrize(
    ("record_of", "layer_id"),
    [(window_record, layer) for layer in range(8)] + [(selected_record, source) for source in (1, 3, 4)],
)
@pytest.mark.parametrize("where", ["code", "scale"])
def test_one_live_byte_changes_the_logits(record_of, layer_id: int, where: str) -> None:
    harness, seq = prefilled()
    record = record_of(harness.caches, seq, layer_id)
    record[5 if where == "code" else -3] ^= 0x04  # another value, never a NaN
    assert (newest_logits(harness, seq) != clean_run()[0]).any()


@pytest.mark.parametrize("layer_id", [1, 3])
def test_the_open_group_is_read(layer_id: int) -> None:
    """The newest token closes a group, whose first half waits in the compression ring."""
    harness, seq = prefilled()
    ring = harness.caches.compression(layer_id)
    ring[seq.slot, (LENGTH - 1) % ring.shape[1], 1, 9] += 1.0
    assert (newest_logits(harness, seq) != clean_run()[0]).any()


@pytest.mark.parametrize("layer_id", [1, 3, 4])
def test_index_keys_are_read(layer_id: int) -> None:
    """Negated keys choose other entries."""
    harness, seq = prefilled()
    harness.caches.paged(layer_id).codes[seq.blocks[0]] ^= 0x88
    assert (newest_logits(harness, seq) != clean_run()[0]).any()


def test_foreign_bytes_are_not_read() -> None:
    harness, seq = prefilled()
    mine = torch.zeros(len(harness.caches.blocks), dtype=torch.bool)
    mine[seq.blocks] = True
    generator = torch.Generator().manual_seed(1)

    def scribble(part: Tensor) -> None:
        part.copy_(torch.randint(0, 256, part.shape, generator=generator).byte())

    blocks, slots = harness.caches.blocks, harness.caches.slots
    for block in (~mine).nonzero().flatten().tolist():
        scribble(blocks[block])
    for slot in range(len(slots)):
        if slot != seq.slot:
            scribble(slots[slot])
    for layer_id in load_config(NAME).kv_source_layer_ids:  # entries of tokens that are still to come
        view, ratio = harness.caches.paged(layer_id), load_config(NAME).ratio(layer_id)
        start = (LENGTH + 1) % BLOCK_SIZE // ratio
        for part in (view.main, view.codes, view.scales):
            scribble(part[seq.blocks[LENGTH // BLOCK_SIZE], start:])
    assert_same_bits(newest_logits(harness, seq), clean_run()[0], "logits")


def test_decode_work_does_not_grow_with_the_history() -> None:
    """One row per layer, a window, a selection and the index keys; no row of the history again."""
    config, model = load_config(NAME), make_harness(NAME).model
    work = {}
    for length in (1024, 4096):
        harness = make_harness(NAME, num_seqs=1, max_tokens=length + 1)
        harness.caches.blocks.zero_()
        harness.caches.slots.zero_()
        seq = harness.add([5] * (length + 1))
        seq.computed = length  # as if prefilled; the work does not depend on the values
        model.counters.reset()
        harness.caches.counters.reset()
        harness.step([(seq, 1)], decode=True)
        assert model.counters.kv_rows == model.counters.query_rows == [1] * config.num_hidden_layers
        work[length] = harness.caches.counters
    small, large = work[1024], work[4096]
    assert small.window_records_read == large.window_records_read == 8 * config.sliding_window
    assert small.main_records_read == large.main_records_read == 7 * config.index_topk
    # Two selections over entries of two tokens, one over entries of one, one over candidate blocks alone.
    chosen = config.candidate_topk_blocks * config.candidate_block_size
    assert [w.index_keys_read for w in (small, large)] == [n // 2 * 2 + n + chosen for n in (1025, 4097)]
    assert large.bytes_read - small.bytes_read == 68 * (large.index_keys_read - small.index_keys_read)
