"""Setting: everything that one measurement depends on. It is what a JSON line repeats."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from deepinfer import Settings
from deepinfer.models.deepseek_v41.rank_share import RankShare

KEEP_TOKENS = 140  # that bounded replay keeps of a prompt, as in the published prefill


@dataclass(frozen=True)
class Setting:
    """One engine and what it is made to do.

    Attributes:
        phase: "decode", "prefill" or "trace".
        model: checkpoint directory, Hub id, or a name of a built-in configuration with `dummy`.
        dummy: random weights instead of a checkpoint's.
        emulated_ep: ranks of the expert-parallel group that one rank's work is measured of.
        redundant_experts: copies of experts in that group.
        emulated_engram: ranks that the Engram tables are divided among; 0 for those of the group.
        num_devices: all devices in use.
        cp: ranks that share a context.
        num_requests: requests at once.
        context_length: prompt tokens of each request; None for prompts of the set as they stand.
        prefill_batch_size: prompt tokens of a prefill step.
        uncached: prompt tokens that a prefill request finds in no cache.
        num_drafts: draft tokens of a step, 0 for no speculation.
        varlen: how many are verified is chosen by confidence and step time.
        yoco_clip: bounded replay of the decoder in prefills.
        keep_tokens: that it keeps.
        warmup, steps: decode steps that are not measured, and that are; of prefill chunks likewise.
        prompts: the set that decoded requests come from.
        temperature, seed: of the requests.
        arithmetic, batch_invariant, async_scheduling: of the engine; None for its defaults.
        threads: of a CPU.
        arrivals: "poisson:RATE" or a file, of a trace; None otherwise.
        num_arrivals, output_tokens: requests of a trace that is drawn, and the output tokens of each.
    """

    phase: str
    model: str
    dummy: bool = False
    emulated_ep: int = 1
    redundant_experts: int = 0
    emulated_engram: int = 0
    num_devices: int = 1
    cp: int = 1
    num_requests: int = 1
    context_length: int | None = None
    prefill_batch_size: int = 4096
    uncached: int | None = None
    num_drafts: int = 0
    varlen: bool = False
    yoco_clip: bool = False
    keep_tokens: int = KEEP_TOKENS
    warmup: int = 50
    steps: int = 60
    prompts: str = "mixed"
    temperature: float = 0.0
    seed: int = 0
    arithmetic: str | None = None
    batch_invariant: bool | None = None
    async_scheduling: bool | None = None
    threads: int = 1
    arrivals: str | None = None
    num_arrivals: int = 0
    output_tokens: int = 0

    def engine_settings(self, base: Settings) -> Settings:
        """The environment's settings with this setting's own in their place."""
        changes: dict[str, Any] = {
            "num_draft_tokens": self.num_drafts,
            "use_draft_budget": self.varlen and self.num_drafts > 0,
        }
        if self.async_scheduling is not None:
            changes["use_async_scheduling"] = self.async_scheduling
        if self.yoco_clip:
            changes |= {"replay_mode": "compact", "replay_keep_tokens": self.keep_tokens}
        return dataclasses.replace(base, **changes)

    def engine_args(self, **args: Any) -> dict[str, Any]:
        """Keywords of `LLM`; those given win."""
        fixed: dict[str, Any] = {
            "model": self.model,
            "seed": self.seed,
            "arithmetic": self.arithmetic,
            "batch_invariant": self.batch_invariant,
            "preemption_mode": "recompute",
        }
        if self.dummy:
            fixed |= {
                "load_format": "dummy",
                "emulated_ep": self.emulated_ep,
                "emulated_redundant_experts": self.redundant_experts,
                "emulated_engram": self.emulated_engram,
            }
        return fixed | args

    @property
    def rank_share(self) -> RankShare:
        """The rank that is emulated; the whole model without."""
        return RankShare(self.emulated_ep, self.redundant_experts, self.emulated_engram)

    def parameters(self) -> dict[str, Any]:
        """All fields, as a JSON object."""
        return dataclasses.asdict(self)
