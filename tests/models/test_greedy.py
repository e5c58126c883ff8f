"""Greedy continuations of the golden prompts, decoded together, and along the engine's own text."""

from __future__ import annotations

import pytest
import torch

from tests.models.checks import NEAR_TIE
from tests.support.golden import golden
from tests.support.models import make_harness

STEPS = 64


@pytest.mark.parametrize("mode", ["fp32", "plain"])
@pytest.mark.parametrize("name", ["tiny-quant", "v41-tiny"])
def test_golden_continuations(name: str, mode: str) -> None:
    data = golden(name)
    steps = STEPS if mode == "fp32" else 24
    prompts = [prompt for prompt in data.greedy if mode in data.greedy[prompt]]
    harness = make_harness(
        name, {"fp32": "float32", "plain": "plain"}[mode], num_seqs=2 * len(prompts), max_tokens=6000
    )
    seqs = [harness.add(data.prompts[prompt]) for prompt in prompts]
    tokens, margins = harness.greedy(seqs, steps)
    for prompt, mine, my_margins in zip(prompts, tokens, margins, strict=True):
        expected = data.greedy[prompt][mode]
        differs = [step for step in range(steps) if mine[step] != expected["token_ids"][step]]
        first = differs[0] if differs else steps
        # The golden text holds up to its first near tie; there the two best may change places.
        assert first >= min(steps, expected.get("clear_steps", 0)), f"{prompt}: step {first}"
        if differs:
            assert expected["margins"][first] < NEAR_TIE, f"{prompt}: a clear token differs at step {first}"
            assert my_margins[first] < 2 * NEAR_TIE, f"{prompt}: step {first} was not close here"

    for prompt, mine in zip(prompts, tokens, strict=True):
        start = len(data.prompts[prompt]) - 1
        own_text = harness.add(data.prompts[prompt] + mine[:-1])
        logits = harness.prefill(own_text, outputs="all")[start:]
        assert logits.argmax(1).tolist() == mine, f"{prompt}: decoding differs from scoring its text"
        assert torch.isfinite(logits).all()
