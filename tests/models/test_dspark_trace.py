"""Draft, verify, accept: the golden trace, and that speculative greedy text is plain greedy text."""

from __future__ import annotations

import pytest
import torch

from tests.models.checks import NEAR_TIE
from tests.support.golden import golden
from tests.support.models import make_draft_harness, make_harness

CONFIDENCE_TOLERANCE = 0.01  # the golden rounding of caches near a tie moves single steps so far


@pytest.mark.parametrize("name", ["tiny-quant", "v41-tiny"])
def test_golden_trace(name: str) -> None:
    """Along the golden text. A draft or token may be another one only where the best two nearly tie."""
    trace = golden(name).json("speculative_trace")
    harness = make_draft_harness(name, num_seqs=1)
    seq = harness.add(golden(name).prompts[trace["prompt"]])
    first = int(harness.prefill(seq).argmax())
    assert first == trace["steps"][0]["anchor"]
    ties = 0
    for step in trace["steps"]:
        where = f"position {step['position']}"
        assert seq.computed == step["position"], where
        anchor, golden_drafts, accepted = step["anchor"], step["draft"], step["accepted"]
        chosen = torch.tensor([golden_drafts], dtype=torch.int32)
        drafts = harness.propose([seq], [anchor], choose=lambda i, _, chosen=chosen: chosen[:, i])
        confidence = drafts.confidence_logits[0].sigmoid()
        torch.testing.assert_close(
            confidence, torch.tensor(step["confidence"]), rtol=0, atol=CONFIDENCE_TOLERANCE, msg=where
        )
        ties += count_ties(drafts.logits[0], golden_drafts, where)
        seq.tokens += [anchor, *golden_drafts]
        logits = harness.step([(seq, 1 + len(golden_drafts))], "all", decode=True)
        # Rows whose token the trace tells: accepted drafts, then one that is not the next draft.
        ties += count_ties(logits[:accepted], golden_drafts[:accepted], where)
        if accepted < len(golden_drafts) and int(logits[accepted].argmax()) == golden_drafts[accepted]:
            ties += count_ties(logits[accepted : accepted + 1], [-1], where)
        harness.roll_back(seq, step["position"] + 1 + accepted)
    assert len(trace["steps"]) >= 34
    assert ties <= 1


def count_ties(logits: torch.Tensor, tokens: list[int], where: str) -> int:
    """Rows whose best token is another one than the golden; that must be by a hair."""
    best = logits.topk(2)
    differs = best.indices[:, 0] != torch.tensor(tokens, dtype=torch.long)
    margins = (best.values[:, 0] - best.values[:, 1])[differs]
    assert (margins < NEAR_TIE).all(), f"{where}: {best.indices[:, 0].tolist()}, not {tokens}; {margins=}"
    return int(differs.sum())


def test_free_running_trace() -> None:
    """Drafts, accepted counts and text by its own choices alone; this prompt stays clear of ties."""
    trace = golden("tiny-quant").json("speculative_trace")
    harness = make_draft_harness("tiny-quant", num_seqs=1)
    seq = harness.add(golden("tiny-quant").prompts[trace["prompt"]])
    steps = harness.speculate(seq, int(harness.prefill(seq).argmax()), max_tokens=47)
    expected = [(s["position"], s["anchor"], s["draft"], s["accepted"]) for s in trace["steps"]]
    assert [(s.position, s.anchor, s.drafts, s.accepted) for s in steps] == expected[: len(steps)]
    assert len(steps) >= 34


@pytest.mark.parametrize("num_drafts", [1, 3, 5])
@pytest.mark.parametrize("prompt", ["len7", "len129"])
def test_speculative_greedy_is_greedy(prompt: str, num_drafts: int) -> None:
    """Bit for bit: rows of a verification step are those of single steps."""
    tokens = golden("v41-tiny").prompts[prompt]
    plain = make_harness("v41-tiny", num_seqs=1)
    (expected,), (margins,) = plain.greedy([plain.add(tokens)], steps=40)
    harness = make_draft_harness("v41-tiny", num_seqs=1)
    seq = harness.add(tokens)
    anchor = int(harness.prefill(seq).argmax())
    steps = harness.speculate(seq, anchor, max_tokens=40, num_drafts=num_drafts)
    text = [anchor, *(token for step in steps for token in step.emitted)]
    found = [margin for step in steps for margin in step.margins]
    assert text[:40] == expected
    assert found[:39] == margins[1:]
    assert sum(step.accepted for step in steps) > 0
    assert any(step.accepted < num_drafts for step in steps)
