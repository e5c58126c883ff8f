"""A row's logits depend on its sequence alone: not on chunking, batch, prefill or decode, blocks or slots."""

from __future__ import annotations

import dataclasses
import functools
import random

import pytest
import torch
from torch import Tensor

from deepinfer.checkpoint.reader import CheckpointReader
from deepinfer.config import ARITHMETICS
from deepinfer.models.deepseek_v41.model import DeepseekV41Model
from deepinfer.models.deepseek_v41.weights import Weights
from tests.support.compare import assert_same_bits
from tests.support.forward_harness import ForwardHarness
from tests.support.golden import golden
from tests.support.models import fold_map, load_backbone, load_config, make_harness
from tests.support.paths import TINY_QUANT

NAMES = ("tiny-quant", "v41-tiny")
MIXED_LENGTHS = (1, 2, 7, 64, 127, 128, 130, 300)


def prompt_of(length: int) -> list[int]:
    return [0, *random.Random(length).choices(range(100, 4000), k=length - 1)]


@functools.cache
def whole(name: str) -> Tensor:
    """[300, vocab] logits of the golden prompt of 300 tokens, computed in one step."""
    harness = make_harness(name, num_seqs=1)
    return harness.prefill(harness.add(golden(name).prompts["len300"]), outputs="all")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("chunk", [1, 7, 128, 129])
def test_chunked_prefill(name: str, chunk: int) -> None:
    length = 150 if chunk == 1 else 300
    harness = make_harness(name, num_seqs=1, seed=chunk)  # blocks in another order, too
    seq = harness.add(golden(name).prompts["len300"][:length])
    logits = harness.prefill(seq, chunk, outputs="all")
    assert_same_bits(logits, whole(name)[:length], f"chunks of {chunk}")


@pytest.mark.parametrize("name", NAMES)
def test_token_by_token_decode(name: str) -> None:
    """From the first token on by decode steps of 1 to 7 rows, as verification of drafts has them."""
    harness = make_harness(name, num_seqs=1)
    seq = harness.add(golden(name).prompts["len300"])
    sizes, parts = random.Random(name), []
    while seq.remaining:
        rows = min(seq.remaining, sizes.choice([1, 1, 2, 3, 6, 7]))
        parts.append(harness.step([(seq, rows)], "all", decode=True))
    assert_same_bits(torch.cat(parts), whole(name), "decode steps")


@pytest.mark.parametrize("name", NAMES)
def test_alone_and_in_a_batch(name: str) -> None:
    """Prompts of mixed lengths prefilled and decoded together, and each of them alone."""
    steps = 3
    together = make_harness(name, num_seqs=len(MIXED_LENGTHS), seed=5)
    seqs = [together.add(prompt_of(length)) for length in MIXED_LENGTHS]
    logits = [together.step([(seq, len(seq.tokens)) for seq in seqs])]
    for _ in range(steps):
        logits.append(together.decode(seqs, logits[-1].argmax(1).tolist()))
    for place, length in enumerate(MIXED_LENGTHS):
        harness = make_harness(name, num_seqs=1)
        seq = harness.add(prompt_of(length))
        alone = [harness.prefill(seq)]
        for step in range(steps):
            alone.append(harness.decode([seq], [seqs[place].tokens[length + step]]))
        for step, row in enumerate(alone):
            assert_same_bits(row[0], logits[step][place], f"{length} tokens, step {step}")


@pytest.mark.parametrize("arithmetic", ["w8a8", "bfloat16", "plain"])
def test_other_arithmetics(arithmetic: str) -> None:
    tokens = golden("tiny-quant").prompts["len300"][:170]
    harness = make_harness("tiny-quant", arithmetic)
    in_one = harness.prefill(harness.add(tokens), outputs="all")
    chunked = harness.add(tokens)
    parts = [harness.prefill(chunked, 48, outputs="all", limit=144)]
    parts += [harness.step([(chunked, 1)], "all", decode=True) for _ in range(26)]
    assert_same_bits(torch.cat(parts), in_one, arithmetic)


def test_rejected_rows_leave_no_trace() -> None:
    """A decode step of six rows of which five are taken back, again and again."""
    name = "v41-tiny"
    tokens = golden(name).prompts["len300"]
    harness = make_harness(name, num_seqs=1)
    seq = harness.add(tokens[:200])
    harness.prefill(seq)
    for position in range(200, 260):
        drafts = random.Random(position).choices(range(100, 4000), k=5)
        seq.tokens[position:] = [tokens[position], *drafts]
        logits = harness.step([(seq, 6)], "all", decode=True)
        assert_same_bits(logits[0], whole(name)[position], f"position {position}")
        seq.computed -= 5


def test_without_batch_invariance() -> None:
    """The library's own products: the same model up to float32's error."""
    config = load_config("tiny-quant")
    arithmetic = dataclasses.replace(ARITHMETICS["plain"], batch_invariant=False)
    with CheckpointReader(TINY_QUANT) as reader:
        model = DeepseekV41Model.load(Weights(reader), config, arithmetic)
    tokens = golden("tiny-quant").prompts["len129"]
    logits = []
    for which in (model, load_backbone("tiny-quant", "plain")):
        harness = ForwardHarness(which, fold_map("tiny-quant"))
        logits.append(harness.prefill(harness.add(tokens), outputs="all"))
    error = (logits[0] - logits[1]).abs().amax(1) / logits[1].std(1)
    assert error.median() < 1e-4
