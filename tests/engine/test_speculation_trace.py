"""What the engine drafts and accepts: the golden trace step by step, and the bundled model's card."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from deepinfer.sampling_params import SamplingParams
from deepinfer.settings import Settings
from tests.engine.matrix import bundled_prompts
from tests.support.engines import WatchedCore, assert_idle, greedy, make_llm, watched
from tests.support.golden import golden
from tests.support.paths import ROOT


@dataclass(frozen=True)
class DecodeStep:
    """One sequence's part in a decode step: where its last token stands, what it verified and kept."""

    position: int
    anchor: int
    drafts: list[int]
    num_accepted: int
    confidences: list[float]


class TracingCore(WatchedCore):
    """Notes every sequence's decode steps.

    Attributes:
        steps: by sequence id.
        prompt_lens: likewise.
    """

    def __init__(self, core: Any) -> None:
        super().__init__(core)
        self.steps: dict[int, list[DecodeStep]] = {}
        self.prompt_lens: dict[int, int] = {}
        self._ended: set[int] = set()

    def commit(self, plan: Any, tokens: Any, **results: Any) -> Any:
        if not plan.is_prefill:
            for place, seq_id in enumerate(plan.seq_ids.tolist()):
                if seq_id in self._ended:  # while this step was in flight
                    continue
                self.prompt_lens[seq_id] = self._core.num_prompt_tokens(seq_id)
                length = self.prompt_lens[seq_id] + self.num_output_tokens(seq_id)
                count = int(plan.seqlens_q[place]) - 1
                self.steps.setdefault(seq_id, []).append(
                    DecodeStep(
                        position=length - 1,
                        anchor=int(self.output_token_ids(seq_id)[-1]),
                        drafts=self.drafts(seq_id)[:count].tolist(),
                        num_accepted=int(results["num_emitted"][place]) - 1,
                        confidences=self.confidences(seq_id)[:count].tolist(),
                    )
                )
        result = self._core.commit(plan, tokens, **results)
        self._ended.update(result.finished_ids.tolist())
        return result


# `dspark_sts_temperatures` of the checkpoints, and how far near-ties in the rounding of caches move a value.
TEMPERATURES = {"tiny-quant": [1.0] * 5, "v41-tiny": [1.5849, 1.122, 1.0, 1.2589, 1.2589]}
CONFIDENCE_TOLERANCE = 0.01
SYNC = Settings(num_draft_tokens=5, use_async_scheduling=False)


@pytest.mark.parametrize("name", ["tiny-quant", "v41-tiny"])
def test_golden_trace(name):
    """Along the golden text, which is forced: a near-tie in one row does not change the rows behind."""
    trace = golden(name).json("speculative_trace")
    steps = trace["steps"]
    text = [steps[0]["anchor"]]
    for step, after in itertools.pairwise(steps):
        text += [*step["draft"][: step["accepted"]], after["anchor"]]
    prompt = list(golden(name).prompts[trace["prompt"]])
    with make_llm(name, settings=SYNC) as llm, watched(llm, TracingCore) as core:
        llm.generate([prompt], greedy(len(text) + 6, golden_token_ids=text), use_tqdm=False)
        assert_idle(llm)
    (mine,) = core.steps.values()
    assert len(mine) >= len(steps) >= 34
    assert [(step.position, step.anchor) for step in mine[: len(steps)]] == [
        (step["position"], step["anchor"]) for step in steps
    ]
    assert [step.num_accepted for step in mine[: len(steps)]] == [step["accepted"] for step in steps]
    num_ties = 0
    for got, want in zip(mine, steps):
        same = next((i for i, d in enumerate(want["draft"]) if d != got.drafts[i]), len(want["draft"]))
        num_ties += same < len(want["draft"])
        raw = np.array(want["confidence"])[: same + 1]  # the golden ones are before calibration
        calibrated = 1 / (1 + np.exp(-np.log(raw / (1 - raw)) / TEMPERATURES[name][: len(raw)]))
        np.testing.assert_allclose(got.confidences[: len(raw)], calibrated, atol=CONFIDENCE_TOLERANCE)
    assert num_ties <= (name == "v41-tiny"), "drafts differ only where the best two nearly tie"


# --- the bundled model's card ------------------------------------------------------------------------------

# Per group: prompts, decode steps and tokens per step of an uncached reference, all greedy with 5 drafts
# until a request has 64 tokens or has ended; what the last step accepts beyond that counts.
CARD = {"questions": (12, 83, 4.30), "stories": (12, 163, 4.81), "prose_and_code": (8, 332, 1.53)}
NUM_TOKENS = 64


@pytest.mark.parametrize("is_async", [False, True])
def test_card(is_async):
    """The card's figures to all their digits, but for one step of prose, where the best two tokens tie."""
    texts = json.loads((ROOT / "examples" / "prompts.json").read_text())
    prompts = dict(zip((text for group in CARD for text in texts[group]), bundled_prompts()))
    settings = Settings(num_draft_tokens=5, use_async_scheduling=is_async)
    for group, (count, num_steps, tokens_per_step) in CARD.items():
        chosen = [list(prompts[text]) for text in texts[group][:count]]
        with make_llm("v41-tiny", settings=settings) as llm, watched(llm, TracingCore) as core:
            # More tokens, since a step does not verify drafts behind the end, nor what may be behind it.
            llm.generate(chosen, SamplingParams(temperature=0, max_tokens=NUM_TOKENS + 12), use_tqdm=False)
            assert_idle(llm)
        counted = [
            step
            for seq_id, steps in core.steps.items()
            for step in steps
            if step.position + 1 - core.prompt_lens[seq_id] < NUM_TOKENS
        ]
        num_emitted = len(counted) + sum(step.num_accepted for step in counted)
        assert abs(len(counted) - num_steps) <= (group == "prose_and_code"), f"{group}: {len(counted)} steps"
        assert round(num_emitted / len(counted), 2) == tokens_per_step, f"{group}: {num_emitted} tokens"
