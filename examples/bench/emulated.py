"""What a measurement of one emulated rank stands for: what is emulated, and what it leaves out."""

from __future__ import annotations

import dataclasses
from typing import Any

from deepinfer import LLM
from deepinfer.models.deepseek_v41.rank_share import skipped_work
from examples.bench.components import StepShape, step_work
from examples.bench.setting import Setting


def report(
    llm: LLM, setting: Setting, shape: StepShape, experts_ms: float | None = None
) -> dict[str, list[Any]]:
    """`emulated`, lines of text, and `skipped`, objects with estimates; nothing of a real model.

    Args:
        llm: the engine.
        setting: its setting.
        shape: of the step that was measured.
        experts_ms: that the routed experts take; their floor when None.
    """
    if not setting.dummy:
        return {}
    config, share = llm.llm_engine.model_config, setting.rank_share
    if experts_ms is None:
        experts_ms = step_work(config, shape, share.resident_of)["routed experts"].floor_ms()
    draft_rows = shape.num_requests * config.dspark_block_size if shape.num_drafts else 0
    skipped = skipped_work(config, share, shape.num_rows, draft_rows, experts_ms)
    return {
        "emulated": share.describe(config).splitlines(),
        "skipped": [dataclasses.asdict(each) for each in skipped],
    }


def text(found: dict[str, Any]) -> str:
    """The same for people; empty for a real model."""
    lines = [f"- {line}" for line in found.get("emulated", ())]
    if found.get("skipped"):
        lines += ["", "| not done by one emulated rank | ms by NVLink | ms by a network |", "|---|---|---|"]
        lines += [
            f"| {each['what']} | {each['nvlink_ms']:.3f} | {each['network_ms']:.3f} |"
            for each in found["skipped"]
        ]
    return "\n".join(lines)
