"""Drafts depend on their sequence alone: not on how its context came, its batch, or what was rejected."""

from __future__ import annotations

import dataclasses
import functools
import random

import pytest
import torch
from torch import Tensor

from deepinfer.layers.rotary import PAGE, RotaryTable
from deepinfer.ops.gemm import linear
from deepinfer.ops.quant import encode_fp8, round_fp8
from deepinfer.runtime.batch import Batch
from tests.support.compare import assert_same_bits
from tests.support.draft_harness import DraftHarness, Drafts, run_block
from tests.support.models import fold_map, load_backbone, load_drafter, make_draft_harness
from tilelang_ops.projection import rotate

NAMES = ("tiny-quant", "v41-tiny")
ANCHOR = 717
MIXED_LENGTHS = (1, 2, 7, 64, 127, 128, 130, 134, 300)


def prompt_of(length: int) -> list[int]:
    return [0, *random.Random(length).choices(range(100, 4000), k=length - 1)]


def assert_same_drafts(actual: Drafts, expected: Drafts, what: str) -> None:
    for field in dataclasses.fields(Drafts):
        got, want = getattr(actual, field.name), getattr(expected, field.name)
        assert_same_bits(got, want, f"{what}: {field.name}")


@functools.cache
def alone(name: str, length: int, arithmetic: str = "float32") -> Drafts:
    """Drafts behind a prompt of `length` tokens that was computed in one step, by itself."""
    harness = make_draft_harness(name, arithmetic, num_seqs=1)
    seq = harness.add(prompt_of(length))
    harness.prefill(seq)
    return harness.propose([seq], [ANCHOR])


def one_of(drafts: Drafts, place: int) -> Drafts:
    """Drafts of one sequence."""
    rows = slice(place, place + 1)
    return Drafts(drafts.tokens[rows], drafts.confidence_logits[rows], drafts.logits[rows])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("chunk", [1, 7, 128, 299])
def test_context_in_chunks(name: str, chunk: int) -> None:
    harness = make_draft_harness(name, num_seqs=1, seed=chunk)
    seq = harness.add(prompt_of(300))
    harness.prefill(seq, chunk)
    assert_same_drafts(harness.propose([seq], [ANCHOR]), alone(name, 300), f"chunks of {chunk}")


@pytest.mark.parametrize("name", NAMES)
def test_context_by_decode_steps(name: str) -> None:
    """A prompt, then steps of 1 to 7 rows; drafts at the ring's border on the way."""
    harness = make_draft_harness(name, num_seqs=1)
    tokens, sizes = prompt_of(300), random.Random(name)
    seq = harness.add(tokens[:100])
    harness.prefill(seq)
    while (start := seq.computed) < 300:
        rows = min(sizes.choice([1, 1, 2, 3, 6, 7]), 300 - start)
        seq.tokens[:] = tokens[: start + rows]
        harness.step([(seq, rows)], "none", decode=True)
        harness.propose([seq], [tokens[start]])  # overwritten by the next step
    assert_same_drafts(harness.propose([seq], [ANCHOR]), alone(name, 300), "decode steps")


@pytest.mark.parametrize("length", [5, 128, 300])
def test_context_when_every_row_is_kept(length: int) -> None:
    """With prompt log-probabilities there are features of every row; only the last window is stored."""
    harness = make_draft_harness("v41-tiny", num_seqs=1)
    seq = harness.add(prompt_of(length))
    harness.prefill(seq, outputs="all")
    assert harness.last_output.features.shape[0] == length
    assert_same_drafts(harness.propose([seq], [ANCHOR]), alone("v41-tiny", length), f"{length} rows")
    before = harness.caches.counters.window_records_written
    output, batch = harness.last_output, harness.last_batch
    harness.drafter.store_context(
        harness.drafter.context(output.features, output.feature_rows, batch), harness.caches
    )
    written = harness.caches.counters.window_records_written - before
    assert written == min(length, 128) * len(harness.drafter.stages)


@pytest.mark.parametrize(
    ("name", "arithmetic"),
    [(name, "float32") for name in NAMES] + [("tiny-quant", a) for a in ("plain", "bfloat16", "w8a8")],
)
def test_alone_and_in_a_batch(name: str, arithmetic: str) -> None:
    """Prompts of mixed lengths filled together; drafted together, in another order, and in two halves."""
    harness = make_draft_harness(name, arithmetic, num_seqs=len(MIXED_LENGTHS), seed=5)
    seqs = [harness.add(prompt_of(length)) for length in MIXED_LENGTHS]
    harness.step([(seq, len(seq.tokens)) for seq in seqs])
    places = list(range(len(seqs)))
    shuffled = random.Random(1).sample(places, len(places))
    for order in (places, shuffled, places[:4], places[4:]):
        together = harness.propose([seqs[place] for place in order], [ANCHOR] * len(order))
        for row, place in enumerate(order):
            length = MIXED_LENGTHS[place]
            expected = alone(name, length, arithmetic)
            assert_same_drafts(one_of(together, row), expected, f"{length} tokens as {row} of {len(order)}")


@pytest.mark.parametrize("start", [1, 122, 258])
@pytest.mark.parametrize("name", NAMES)
def test_rejected_drafts_leave_no_trace(name: str, start: int) -> None:
    """Verification steps with random numbers of drafts, random ones of them kept, across the ring's border.

    The same as running the kept tokens one by one.
    """
    tokens, choices = prompt_of(300), random.Random(f"{name} {start}")
    tried, plain = make_draft_harness(name, num_seqs=1), make_draft_harness(name, num_seqs=1)
    a, b = tried.add(tokens[:start]), plain.add(tokens[:start])
    tried.prefill(a)
    plain.prefill(b)
    rejected = 0
    while (position := a.computed) < start + 24:
        anchor = tokens[position]
        first, second = tried.propose([a], [anchor]), plain.propose([b], [anchor])
        assert_same_drafts(first, second, f"position {position}")
        assert_same_drafts(tried.propose([a], [anchor]), first, f"position {position} again")
        num_drafts = choices.randint(0, 5)
        kept = min(choices.randint(0, 3), num_drafts)
        wrong = choices.choices(range(100, 4000), k=num_drafts - kept)
        a.tokens[position:] = [*tokens[position : position + 1 + kept], *wrong]
        tried.step([(a, 1 + num_drafts)], "all", decode=True)
        tried.roll_back(a, position + 1 + kept)
        rejected += len(wrong)
        for token in tokens[position : position + 1 + kept]:
            plain.decode([b], [token])
    assert rejected > 5


@pytest.mark.parametrize("name", NAMES)
def test_touches_its_own_slots_only(name: str) -> None:
    """What other slots and blocks hold changes nothing, and drafting writes block positions only."""
    harness = make_draft_harness(name, num_seqs=4)
    lengths = (130, 40)
    seqs = [harness.add(prompt_of(length)) for length in lengths]
    for seq in seqs:
        harness.prefill(seq)
    caches, drafter = harness.caches, harness.drafter
    random_bytes = torch.randint(
        0, 256, caches.slots.shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(1)
    )
    mine = torch.zeros(len(caches.slots), dtype=torch.bool)
    mine[[seq.slot for seq in seqs]] = True
    caches.slots[~mine] = random_bytes[~mine]
    caches.blocks.fill_(0xFF)  # the drafter reads no compressed entries
    for layer in harness.model.layers:  # nor the backbone's windows
        caches.window(layer.layer_id).fill_(0xFF)
    before = caches.slots.clone()
    drafts = harness.propose(seqs, [ANCHOR, ANCHOR])
    for place, length in enumerate(lengths):
        assert_same_drafts(one_of(drafts, place), alone(name, length), f"{length} tokens")
    ring = caches.window(drafter.stages[0].layer_id).shape[1]
    for seq in seqs:
        changed = caches.slots[seq.slot] != before[seq.slot]
        for layout in caches.layout.windows:
            records = changed[layout.offset : layout.offset + layout.num_bytes].view(ring, -1).any(1)
            is_draft = layout.layer_id in [stage.layer_id for stage in drafter.stages]
            expected = {(seq.computed + i) % ring for i in range(5)} if is_draft else set()
            assert set(records.nonzero().flatten().tolist()) == expected, layout
        sections = [slice(w.offset, w.offset + w.num_bytes) for w in caches.layout.windows]
        for section in sections:
            changed[section] = False
        assert not changed.any()
    assert_same_bits(caches.slots[~mine], before[~mine], "other slots")


@pytest.mark.parametrize("num_drafts", [1, 2, 3, 4, 5])
def test_fewer_drafts_are_the_first_ones(num_drafts: int) -> None:
    """The block runs whole and is cut."""
    harness = make_draft_harness("v41-tiny", num_seqs=1)
    seq = harness.add(prompt_of(130))
    harness.prefill(seq)
    drafts, whole = harness.propose([seq], [ANCHOR], num_drafts), alone("v41-tiny", 130)
    expected = Drafts(*(getattr(whole, f.name)[:, :num_drafts] for f in dataclasses.fields(Drafts)))
    assert_same_drafts(drafts, expected, f"{num_drafts} drafts")


def test_chosen_tokens_steer_what_follows() -> None:
    """Logits and confidences of a step follow from the block's state and the token chosen before it."""
    harness = make_draft_harness("v41-tiny", "plain")
    seqs = [harness.add(prompt_of(length)) for length in (5, 130)]
    for seq in seqs:
        harness.prefill(seq)
    tokens = torch.tensor([[5, 9, 4095, 0, 77], [1, 1, 3, 2500, 8]], dtype=torch.int32)

    def choose(step: int, logits: Tensor) -> Tensor:
        logits.fill_(torch.nan)  # they are the caller's to change
        return tokens[:, step]

    drafts = harness.propose(seqs, [ANCHOR, 12], choose=choose)
    assert_same_bits(drafts.tokens, tokens, "tokens")
    drafter, hidden = harness.drafter, run_block(harness, seqs, [ANCHOR, 12])
    previous = torch.cat([torch.tensor([[ANCHOR], [12]]), tokens[:, :-1]], 1).long()
    rows = drafter.markov_embed.weight.double()[previous]
    logits = drafter.base_logits(hidden).double() + rows @ drafter.markov_head.weight.double().T
    torch.testing.assert_close(drafts.logits.double(), logits, rtol=1e-5, atol=1e-5)
    confidences = (torch.cat([hidden.double(), rows], -1) @ drafter.confidence.weight.double().T).squeeze(-1)
    torch.testing.assert_close(drafts.confidence_logits.double(), confidences, rtol=1e-5, atol=1e-5)


def test_no_sequence() -> None:
    harness = make_draft_harness("tiny-quant")
    empty = torch.empty(0, dtype=torch.int32)
    proposal = harness.drafter.propose(
        empty, empty, empty, harness.caches, lambda *_: pytest.fail("called"), 3
    )
    assert proposal.tokens.shape == proposal.confidence_logits.shape == (0, 3)
    assert proposal.tokens.dtype == torch.int32


def test_ring_must_hold_context_and_block() -> None:
    for room in (4, 5):
        harness = make_draft_harness("v41-tiny", num_seqs=1, max_backtracking=room)
        seq = harness.add(prompt_of(300))
        if room == 4:
            with pytest.raises(AssertionError, match="raise max_backtracking"):
                harness.prefill(seq)
        else:
            harness.prefill(seq)
            assert_same_drafts(harness.propose([seq], [ANCHOR]), alone("v41-tiny", 300), "smallest ring")


def store_one(harness: DraftHarness, features: Tensor, position: int, slot: int) -> None:
    """Store the context of one decode row, at any position."""

    def ints(*values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32)

    batch = Batch(
        input_ids=ints(5),
        positions=ints(position),
        row_seq=ints(0),
        ngram_ids=ints().view(1, 0),
        cu_seqlens_q=ints(0, 1),
        seqlens_k=ints(position + 1),
        state_slots=ints(slot),
        block_tables=ints().view(1, 0),
        total_lens=ints(position + 1),
        keep_all=ints(0),
        window_starts=ints(0),
        output_rows=ints(0),
        max_seqlen_k=position + 1,
        is_prefill=False,
    )
    with torch.inference_mode():
        harness.drafter.store_context(
            harness.drafter.context(features, torch.tensor([0]), batch), harness.caches
        )


def test_block_may_run_past_the_longest_text() -> None:
    """The anchor of a text that fills the last position of a page of the rotary table."""
    drafter = load_drafter("v41-tiny")
    drafter = dataclasses.replace(drafter, rotary=RotaryTable(drafter.rotary.frequencies))
    harness = DraftHarness(load_backbone("v41-tiny"), drafter, fold_map("v41-tiny"), num_seqs=1)
    harness.caches.slots.zero_()
    features = torch.randn(1, drafter.main_proj.weight.shape[1], generator=torch.Generator().manual_seed(0))
    store_one(harness, features, PAGE - 1, slot=1)
    seq = harness.add([])
    seq.computed = PAGE
    assert harness.propose([seq], [ANCHOR]).logits.isfinite().all()


def test_inputs_of_the_context_are_rounded() -> None:
    """With FP8 activations `main_proj` and every `wkv` read E4M3 values."""
    harness = make_draft_harness("tiny-quant", "w8a8")
    drafter, position, slot = harness.drafter, 1000, 2
    generator = torch.Generator().manual_seed(3)
    features = torch.randn(1, drafter.main_proj.weight.shape[1], generator=generator).bfloat16()
    store_one(harness, features, position, slot)
    assert not torch.equal(round_fp8(features), features)
    x = round_fp8(drafter.main_norm(linear(round_fp8(features), drafter.main_proj.weight)))
    for stage in drafter.stages:
        kv = stage.attention.kv_norm(linear(x, stage.attention.wkv.weight))
        rotate(kv, *drafter.rotary.rows(torch.tensor([position]), position + 1))
        ring = harness.caches.window(stage.layer_id)
        assert_same_bits(ring[slot, position % ring.shape[1]], torch.cat(encode_fp8(kv), 1)[0], "record")
