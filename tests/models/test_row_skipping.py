"""Prefill without the decoder rows that nobody reads equals prefill with all of them, bit for bit."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch

from tests.support.compare import assert_same_bits
from tests.support.forward_harness import ForwardHarness
from tests.support.models import fold_map, load_backbone

STEPS = 6


def prompt_of(length: int) -> list[int]:
    return [0, *random.Random(length).choices(range(100, 4000), k=length - 1)]


def expected_rows(total: int, layer_id: int, model) -> int:
    """Rows of a prompt whose window KV decoder layer `layer_id` makes."""
    last, window = model.spec.num_layers - 1, model.config.sliding_window
    return min(total, window + (last - layer_id) * (window - 1))


@pytest.mark.parametrize(
    ("name", "length", "chunk"),
    [
        ("tiny-quant", 700, None),
        ("tiny-quant", 1500, 256),  # the first chunks have no decoder rows at all
        ("v41-tiny", 700, 129),
        ("v41-tiny", 1500, None),
    ],
)
def test_skipping_changes_no_bit(name: str, length: int, chunk: int | None) -> None:
    model = load_backbone(name)
    prompt = prompt_of(length)
    results = []
    for skip in (True, False):
        harness = ForwardHarness(dataclasses.replace(model, skip_rows=skip), fold_map(name), num_seqs=1)
        model.counters.reset()
        seq = harness.add(prompt)
        logits = [harness.prefill(seq, chunk)]
        counted = (list(model.counters.kv_rows), list(model.counters.query_rows))
        for _ in range(STEPS):
            logits.append(harness.decode([seq], [int(logits[-1].argmax())]))
        results.append((torch.cat(logits), counted))
    (skipped, counted), (full, counted_full) = results
    assert_same_bits(skipped, full, "logits of the newest token and of decode steps")

    spec = model.spec
    decoder = range(spec.first_decoder_layer, spec.num_layers)
    rows = [length] * spec.first_decoder_layer + [expected_rows(length, layer, model) for layer in decoder]
    assert counted[0] == rows
    assert counted[1] == [length] * spec.first_decoder_layer + rows[spec.first_decoder_layer + 1 :] + [1]
    assert counted_full == ([length] * spec.num_layers, [length] * (spec.num_layers - 1) + [1])


def test_mixed_batch_and_features() -> None:
    """Several prompts in one step, one of them with all outputs; features of the last window are complete."""
    name, lengths = "v41-tiny", (560, 40, 700)
    model, window = load_backbone(name), load_backbone(name).config.sliding_window
    results = []
    for skip in (True, False):
        harness = ForwardHarness(dataclasses.replace(model, skip_rows=skip), fold_map(name))
        seqs = [harness.add(prompt_of(length)) for length in lengths]
        work = [(seq, len(seq.tokens)) for seq in seqs]
        logits = harness.step(work, want_features=True)
        output, batch = harness.last_output, harness.last_batch
        places = {
            (int(batch.row_seq[row]), int(batch.positions[row])): place
            for place, row in enumerate(output.feature_rows.tolist())
        }
        newest = [(seq, p) for seq, n in enumerate(lengths) for p in range(max(0, n - window), n)]
        results.append((logits, output.features[[places[key] for key in newest]], len(places)))
    assert_same_bits(results[0][0], results[1][0], "logits")
    assert_same_bits(results[0][1], results[1][1], "features")
    assert results[0][2] < results[1][2] == sum(lengths)


def test_a_step_without_outputs_or_decoder_rows() -> None:
    name = "tiny-quant"
    harness = ForwardHarness(load_backbone(name), fold_map(name), num_seqs=1)
    seq = harness.add(prompt_of(1400))
    assert harness.step([(seq, 300)], want_features=True).shape == (0, harness.model.spec.vocab_size)
    output = harness.last_output
    assert output.hidden_states.shape == (0, harness.model.config.hidden_size)
    width = len(harness.model.config.dspark_target_layer_ids) * harness.model.config.hidden_size
    assert output.features.shape == (0, width) and output.feature_rows.shape == (0,)
