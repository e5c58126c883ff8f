"""What a calibration did, as text and as JSON values."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from deepinfer.sampling.calibration import (
    Blocks,
    Calibration,
    PositionReport,
    ReliabilityBin,
    reliability_table,
    reliability_text,
    report_survivals,
)


@dataclass(frozen=True)
class Estimates:
    """Survival estimates from one source.

    Attributes:
        name: a heading.
        survivals: [N, k].
        calibration: the numbers behind them; None when they come from several fits.
    """

    name: str
    survivals: np.ndarray
    calibration: Calibration | None = None

    @classmethod
    def of(cls, name: str, blocks: Blocks, calibration: Calibration) -> Estimates:
        """The estimates of a calibration."""
        return cls(name, calibration.survivals(blocks.logits), calibration)


def describe(
    blocks: Blocks,
    estimates: Sequence[Estimates],
    found: Calibration,
    groups: Sequence[str],
    group_of: np.ndarray,
    *,
    by_position: bool,
) -> str:
    """Tables of estimates against outcomes.

    Args:
        estimates: what to compare, in order.
        found: the fit of all blocks.
        groups: names of the groups of prompts.
        group_of: [N] places among `groups`.
        by_position: also a reliability table for each position.
    """
    lines = ["", f"position  blocks  accepted  {'':17}      T      b   mean    ECE  log loss  AUROC"]
    reports = [report_survivals(blocks, each.survivals) for each in estimates]
    for position in range(blocks.num_positions):
        first = reports[0][position]
        start = f"{position + 1:8d} {first.num_blocks:7d}  {first.acceptance:8.4f}"
        for each, entries in zip(estimates, reports):
            # Held-out estimates come from several fits; beside them stand the numbers that are written.
            scale = found if each.calibration is None else each.calibration
            numbers = f"{scale.temperatures[position]:6.3f} {scale.offsets[position]:6.2f}"
            lines.append(f"{start:26}  {each.name:17} {numbers} {_measures(entries[position])}")
            start = ""
    for position in np.flatnonzero(found.is_at_grid_end).tolist():
        lines.append(f"position {position + 1} ends at an end of the grid: the head needs training")
    if len(groups) > 1:
        lines += ["", "mean over positions, by group", f"{'group':26}  {'':17}   blocks    ECE  log loss"]
        for place, name in enumerate(groups):
            lines += _group_lines(name, blocks, estimates, group_of == place)
    lines += ["", "reliability of all survival estimates: how many, their mean, how many came true"]
    every = range(blocks.num_positions)
    lines.append(reliability_text({each.name: _pooled(blocks, each, every) for each in estimates}))
    for position in every if by_position else ():
        lines += ["", f"position {position + 1}"]
        lines.append(reliability_text({each.name: _pooled(blocks, each, [position]) for each in estimates}))
    return "\n".join(lines) + "\n"


def notes_of(blocks: Blocks, estimates: Sequence[Estimates]) -> dict[str, list[dict[str, Any]]]:
    """The reports by position, for a file; what is undefined is None."""
    return {
        each.name: [
            {
                name: None if isinstance(value, float) and math.isnan(value) else value
                for name, value in dataclasses.asdict(entry).items()
            }
            for entry in report_survivals(blocks, each.survivals)
        ]
        for each in estimates
    }


def _measures(entry: PositionReport) -> str:
    return f"{entry.survival:6.3f} {entry.ece:6.3f} {entry.log_loss:9.4f} {entry.auroc:6.3f}"


def _group_lines(name: str, blocks: Blocks, estimates: Sequence[Estimates], chosen: np.ndarray) -> list[str]:
    """A line for each of the estimates; none where the group has too few blocks."""
    part = blocks.select(chosen)
    if not all(part.known(position).any() for position in range(part.num_positions)):
        return [f"{name:26}  too few blocks"]
    lines = []
    for each in estimates:
        entries = report_survivals(part, each.survivals[chosen])
        ece = sum(entry.ece for entry in entries) / len(entries)
        loss = sum(entry.log_loss for entry in entries) / len(entries)
        lines.append(f"{name:26}  {each.name:17} {len(part.logits):8d} {ece:6.3f} {loss:9.4f}")
        name = ""
    return lines


def _pooled(blocks: Blocks, estimates: Estimates, positions: Sequence[int]) -> list[ReliabilityBin]:
    """The reliability table over the estimates of several positions together."""
    known = {position: blocks.known(position) for position in positions}
    scores = [estimates.survivals[mask, position] for position, mask in known.items()]
    labels = [blocks.labels(position)[mask] for position, mask in known.items()]
    return reliability_table(np.concatenate(scores), np.concatenate(labels))
