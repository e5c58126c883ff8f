"""Confidences of drafts: the drafter's logits, scaled by what a calibration found, become probabilities.

    c_k = sigmoid(logit_k / T_k + b_k)          T_k >= 1e-5; b_k is 0 unless temperatures alone did not fit

Where the numbers come from is decided here and nowhere else: the environment, else a calibration file, else
the checkpoint, else T = 1. A file is JSON with "format", "temperatures", "offsets" (both one number per
position of the drafter's block) and whatever else its writer wants to remember.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tilelang_ops.sampling import finish_drafts

FILE_FORMAT = "deepinfer-confidence-1"
MIN_TEMPERATURE = 1e-5


@dataclass(frozen=True)
class ConfidenceScale:
    """One temperature and one offset per draft position, on the drafter's device."""

    temperatures: Tensor  # [k] float32
    offsets: Tensor  # [k] float32

    @classmethod
    def of(cls, temperatures: Sequence[float], offsets: Sequence[float] | None = None) -> ConfidenceScale:
        """From plain numbers; offsets are 0 when None. Temperatures have a floor of MIN_TEMPERATURE."""
        scale = torch.tensor([max(value, MIN_TEMPERATURE) for value in temperatures])
        return cls(scale, torch.zeros_like(scale) if offsets is None else torch.tensor(offsets))

    def to(self, device: torch.device) -> ConfidenceScale:
        """The same on another device."""
        return ConfidenceScale(self.temperatures.to(device), self.offsets.to(device))

    def finish(
        self,
        tokens: Tensor,
        logits: Tensor,
        eos_token_id: int,
        out: tuple[Tensor, Tensor, Tensor],
        places: Tensor | None = None,
        first: int = 0,
    ) -> None:
        """A step's drafts, confidences and raw logits: those that were proposed, and what stands for others.

        Behind a draft that ends the sequence the confidence is 0: nothing there is worth it.

        Args:
            tokens: [n, k] int32 and
            logits: [n, k] float32 of n sequences.
            eos_token_id: ends a sequence.
            out, places, first: as for `finish_drafts`.
        """
        scale = self.temperatures, self.offsets
        finish_drafts(tokens.t().contiguous(), logits, *scale, eos_token_id, out, places, first)


def resolve_confidence_scale(
    num_drafts: int,
    *,
    environment: Sequence[float] | None = None,
    calibration_file: str | Path | None = None,
    checkpoint: Sequence[float] | None = None,
) -> ConfidenceScale:
    """The scale of the first `num_drafts` positions, from the first source that is given.

    Args:
        num_drafts: k, drafts proposed per step; 0 without speculation, then no source is looked at.
        environment: DEEPINFER_DFLASH_CONFIDENCE_HEAD_TEMPERATURE: one temperature for all, or k.
        calibration_file: what `python -m deepinfer.calibrate` wrote.
        checkpoint: the config's `dspark_sts_temperatures`, at least k.

    Raises:
        ValueError: for a wrong number of temperatures, and for a file that is none of ours.
    """
    if num_drafts == 0:
        return ConfidenceScale.of([])
    if environment is not None:
        if len(environment) not in (1, num_drafts):
            raise ValueError(
                f"DEEPINFER_DFLASH_CONFIDENCE_HEAD_TEMPERATURE has {len(environment)} numbers: give one for "
                f"all positions, or {num_drafts}, one for each draft of a step"
            )
        return ConfidenceScale.of(tuple(environment) * (num_drafts // len(environment)))
    if calibration_file is not None:
        content = read_calibration(calibration_file)
        temperatures, offsets = content["temperatures"], content["offsets"]
        if len(temperatures) < num_drafts:
            raise ValueError(
                f"{calibration_file} calibrates {len(temperatures)} draft positions, {num_drafts} are used: "
                "make a new one"
            )
        return ConfidenceScale.of(temperatures[:num_drafts], offsets[:num_drafts])
    if checkpoint is not None:
        return ConfidenceScale.of(checkpoint[:num_drafts])
    return ConfidenceScale.of([1.0] * num_drafts)


def read_calibration(path: str | Path) -> dict[str, Any]:
    """A calibration file's content, its numbers checked.

    Raises:
        ValueError: naming the file and what is wrong with it.
    """
    try:
        content = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"calibration file {path} cannot be read: {error}") from error
    if not isinstance(content, dict) or content.get("format") != FILE_FORMAT:
        raise ValueError(
            f"{path} is no calibration file (its format is not {FILE_FORMAT!r}): make one with "
            "python -m deepinfer.calibrate"
        )
    for name, lowest in (("temperatures", 0.0), ("offsets", -math.inf)):
        values = content.get(name)
        if not isinstance(values, list) or not all(_is_number(value, lowest) for value in values):
            raise ValueError(f"{path}: {name} must be a list of finite numbers > {lowest:g}, got {values!r}")
    if len(content["temperatures"]) != len(content["offsets"]):
        raise ValueError(f"{path}: temperatures and offsets differ in length")
    return content


def write_calibration(
    path: str | Path, temperatures: Sequence[float], offsets: Sequence[float], notes: Mapping[str, Any]
) -> None:
    """Write a file that `read_calibration` reads; `notes` are JSON values beside the numbers."""
    content = {
        "format": FILE_FORMAT,
        "temperatures": [float(value) for value in temperatures],
        "offsets": [float(value) for value in offsets],
        **notes,
    }
    Path(path).write_text(json.dumps(content, indent=2) + "\n")


def _is_number(value: Any, lowest: float) -> bool:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and math.isfinite(value) and value > lowest
