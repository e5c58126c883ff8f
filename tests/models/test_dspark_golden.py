"""The drafter against golden data, and against its definition at lengths that the golden data lacks."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from deepinfer.models.deepseek_v41.attention import Attention
from deepinfer.models.deepseek_v41.dspark import Drafter
from tests.models.dense_drafter import dense_block
from tests.models.golden_runs import row_errors
from tests.support.draft_harness import DraftHarness, Drafts, run_block
from tests.support.golden import golden
from tests.support.models import ARITHMETIC_OF_MODE, fold_map, load_backbone, load_config, load_drafter

NAMES = ("tiny-quant", "v41-tiny")
PROMPTS = [("tiny-quant", f"len{n}") for n in (7, 129, 300)] + [
    ("v41-tiny", f"len{n}") for n in (7, 128, 129)
]
# Largest relative error of a row. Two float32 implementations agree to 1e-6 where nothing is rounded; a cache
# code on the other side of a tie moves a row by some thousandths. Rounded activations: see the golden README.
LIMITS = {"plain": 1e-5, "fp32": 1e-2, "bf16": 0.12, "w8a8": 0.2}


@dataclass(frozen=True)
class Run:
    """A golden prompt and the drafts behind it: values by their golden names, [rows, width] each."""

    values: dict[str, Tensor]
    drafts: Drafts


@functools.cache
def draft(name: str, mode: str, prompt: str) -> Run:
    return draft_with(load_drafter(name, ARITHMETIC_OF_MODE[mode]), name, mode, prompt)


def draft_with(drafter: Drafter, name: str, mode: str, prompt: str) -> Run:
    """Prefill a golden prompt and draft behind the golden anchor; the golden drafts are chosen."""
    data = golden(name)
    expected = data.dspark.under(f"{prompt}/{mode}")
    model = load_backbone(name, ARITHMETIC_OF_MODE[mode])
    harness = DraftHarness(model, drafter, fold_map(name), num_seqs=1)
    seq = harness.add(data.prompts[prompt])
    harness.prefill(seq)
    anchor, tokens = int(expected["anchor"]), expected["draft_tokens"]
    drafts = harness.propose([seq], [anchor], choose=lambda step, _: tokens[step : step + 1])
    hidden = run_block(harness, [seq], [anchor])
    values = {
        "target_features_last": harness.last_output.features[-1:],
        "hidden_before_norm": hidden[0],
        "base_logits": drafter.base_logits(hidden)[0],
        "draft_logits": drafts.logits[0],
        "confidence_logits": drafts.confidence_logits,
        "confidence": drafts.confidence_logits.sigmoid(),
    }
    return Run(values, drafts)


def check(run: Run, name: str, mode: str, prompt: str) -> None:
    """Every golden value in a mode within the mode's limit; raises AssertionError."""
    expected = golden(name).dspark.under(f"{prompt}/{mode}")
    assert set(expected) - {"anchor", "draft_tokens"} >= set(run.values) - {"base_logits"}
    assert ("base_logits" in expected) == (mode == "fp32")
    for what, value in run.values.items():
        if what in expected:
            error = row_errors(value, expected[what].view(value.shape)).max()
            assert error <= LIMITS[mode], f"{name} {prompt} {mode} {what}: error {error:.1e}"


@pytest.mark.parametrize("mode", list(LIMITS))
@pytest.mark.parametrize(("name", "prompt"), PROMPTS)
def test_golden(name: str, prompt: str, mode: str) -> None:
    check(draft(name, mode, prompt), name, mode, prompt)


@pytest.mark.parametrize(("mode", "num_drafts"), [("plain", 5), ("fp32", 5), ("bf16", 3), ("w8a8", 3)])
@pytest.mark.parametrize(("name", "prompt"), PROMPTS)
def test_draft_tokens(name: str, prompt: str, mode: str, num_drafts: int) -> None:
    """Behind golden drafts the best token is the next one; of rounded activations, the first three."""
    expected = golden(name).dspark[f"{prompt}/{mode}/draft_tokens"].tolist()
    best = draft(name, mode, prompt).drafts.logits[0].argmax(1).tolist()
    assert best[:num_drafts] == expected[:num_drafts]


def with_attention(drafter: Drafter, make=dataclasses.replace, **parts) -> Drafter:
    """The attention of every stage changed."""
    stages = [
        dataclasses.replace(stage, attention=make(stage.attention, **parts)) for stage in drafter.stages
    ]
    return dataclasses.replace(drafter, stages=tuple(stages))


class CausalAttention(Attention):
    """A row of the block sees no row behind it."""

    def forward_in_rings(self, x, rotation, index, caches):
        block = x.shape[0]  # one sequence
        behind = torch.ones(block, block).triu(1).bool()
        index = torch.cat([index[:, :-block], index[:, -block:].masked_fill(behind, -1)], 1)
        return super().forward_in_rings(x, rotation, index, caches)

    @classmethod
    def of(cls, attention: Attention) -> CausalAttention:
        return cls(**{field.name: getattr(attention, field.name) for field in dataclasses.fields(Attention)})


class EarlyBlock(Drafter):
    """The block stands one position too early."""

    def run_block(self, anchors, positions, state_slots, caches):
        return super().run_block(anchors, positions - 1, state_slots, caches)


def confidence_after_norm(drafter: Drafter) -> Drafter:
    hidden = drafter.norm.weight.shape[0]

    def confidence(x: Tensor, *args) -> Tensor:
        return drafter.confidence(torch.cat([drafter.norm(x[:, :hidden]), x[:, hidden:]], 1), *args)

    return dataclasses.replace(drafter, confidence=confidence)


def as_class(kind: type[Drafter], drafter: Drafter) -> Drafter:
    return kind(**{field.name: getattr(drafter, field.name) for field in dataclasses.fields(Drafter)})


def markov(drafter: Drafter, weight: Tensor) -> Drafter:
    return dataclasses.replace(drafter, markov_embed=dataclasses.replace(drafter.markov_embed, weight=weight))


MUTANTS = {
    "window one short": lambda d: dataclasses.replace(d, window=d.window - 1),
    "window one long": lambda d: dataclasses.replace(d, window=d.window + 1),
    "block one early": lambda d: as_class(EarlyBlock, d),
    "causal block": lambda d: with_attention(d, CausalAttention.of),
    "another noise token": lambda d: dataclasses.replace(d, noise_token_id=d.noise_token_id - 1),
    "context without its norm": lambda d: dataclasses.replace(d, main_norm=lambda x: x),
    "stages exchanged": lambda d: dataclasses.replace(d, stages=(d.stages[1], d.stages[0], *d.stages[2:])),
    "no sink": lambda d: with_attention(d, sink=torch.full_like(d.stages[0].attention.sink, -1e9)),
    "Markov tables exchanged": lambda d: markov(d, d.markov_head.weight),
    "confidence behind the norm": confidence_after_norm,
}


@pytest.mark.parametrize("mutant", list(MUTANTS))
def test_mutants_fail(mutant: str) -> None:
    name, mode, prompt = "tiny-quant", "plain", "len300"
    drafter = load_drafter(name, ARITHMETIC_OF_MODE[mode])
    check(draft_with(drafter, name, mode, prompt), name, mode, prompt)
    with pytest.raises(AssertionError, match="error"):
        check(draft_with(MUTANTS[mutant](drafter), name, mode, prompt), name, mode, prompt)


@pytest.mark.parametrize("name", NAMES)
def test_definition_at_every_edge(name: str) -> None:
    """Prompts shorter than the window, as long, and around the end of the ring, each grown from the last."""
    drafter, config = load_drafter(name, "plain"), load_config(name)
    tokens = golden(name).prompts["len300"]
    harness = DraftHarness(load_backbone(name, "plain"), drafter, fold_map(name), num_seqs=1)
    seq, features = harness.add([]), []
    for length in (1, 2, 5, 64, *range(127, 137), *range(260, 272)):
        seq.tokens[:] = tokens[:length]
        harness.step([(seq, seq.remaining)], "all", decode=seq.computed > 0 and seq.remaining < 7)
        features.append(harness.last_output.features)
        hidden = run_block(harness, [seq], [tokens[length]])[0]
        expected = dense_block(drafter, config, torch.cat(features), tokens[length])
        error = row_errors(hidden, expected).max()
        assert error < 1e-5, f"{length} tokens: error {error:.1e}"
