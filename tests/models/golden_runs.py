"""Forwards over the golden prompts, each run once and shared by the tests that look at it."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.runtime.caches import Caches
from tests.support.forward_harness import ForwardHarness, TestSequence
from tests.support.golden import golden
from tests.support.models import ARITHMETIC_OF_MODE, fold_map, load_backbone
from tests.support.observe import Record, observe

# Of the longest prompt only these inner values are in the golden data; of the others all are recorded.
KEPT_OF_LONGEST = ("selected", "candidates", "engram_ids")


@dataclass(frozen=True)
class GoldenRun:
    """One prompt in one mode, all rows computed in one step.

    Attributes:
        logits: [tokens, vocab] float32.
        record: what the parts of the model saw.
        features: [tokens, targets * hidden] of the drafter.
        caches, sequence: the pools afterwards, and what the prompt owns in them.
    """

    logits: Tensor
    record: Record
    features: Tensor
    caches: Caches
    sequence: TestSequence


@functools.cache
def golden_run(name: str, mode: str, prompt: str) -> GoldenRun:
    """Run a golden prompt of model `name` in a mode of the golden data."""
    model = load_backbone(name, ARITHMETIC_OF_MODE[mode])
    model, record = observe(model, KEPT_OF_LONGEST if prompt == "len1000" else None)
    tokens = golden(name).prompts[prompt]
    harness = ForwardHarness(model, fold_map(name), num_seqs=1, max_tokens=len(tokens))
    sequence = harness.add(tokens)
    logits = harness.step([(sequence, len(tokens))], "all", want_features=True)
    return GoldenRun(logits, record, harness.last_output.features, harness.caches, sequence)


def row_errors(actual: Tensor, expected: Tensor) -> Tensor:
    """[rows] float64: root mean square of the difference of each row by that of the expected row."""
    actual, expected = actual.double().flatten(1), expected.double().flatten(1)
    scale = expected.square().mean(1).clamp_min(torch.finfo(torch.float64).tiny)
    return ((actual - expected).square().mean(1) / scale).sqrt()
