"""What a step decided: on the device when its work is queued, on the host when it has run."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from torch import Tensor


@dataclass(frozen=True)
class StepResult:
    """What a step decided, on the host; R output rows, S sequences. What nobody asked for is None."""

    token_ids: np.ndarray  # [R] int32
    faults: np.ndarray  # [R] uint8, 0 where the row is sound
    logprobs: np.ndarray | None  # [R] float32
    ranks: np.ndarray | None  # [R] int32
    top_ids: np.ndarray | None  # [R, K] int32
    top_logprobs: np.ndarray | None  # [R, K] float32
    num_emitted: np.ndarray | None = None  # [S] int32, decode steps
    drafts: np.ndarray | None = None  # [S, k] int32
    confidences: np.ndarray | None = None  # [S, k] float32
    confidence_logits: np.ndarray | None = None  # [S, k] float32 raw, where the runner keeps them
    ends: np.ndarray | None = None  # [R] uint8, 1 where the row's token ends its sequence's grammar
    device_ms: float = 0.0  # time that the device worked on the step

    def as_arrays(self) -> dict[str, np.ndarray | None]:
        """Arguments of the core's `commit`."""
        return {
            "tokens": self.token_ids,
            "num_emitted": self.num_emitted,
            "logprobs": self.logprobs,
            "ranks": self.ranks,
            "top_ids": self.top_ids,
            "top_logprobs": self.top_logprobs,
            "faults": self.faults,
            "ends": self.ends,
            "drafts": self.drafts,
            "confidences": self.confidences,
        }


@dataclass(frozen=True)
class StepOutput:
    """The same before it is on the host: what the device's queue will have made. See `StepResult`."""

    token_ids: Tensor
    faults: Tensor
    logprobs: Tensor | None
    ranks: Tensor | None
    top_ids: Tensor | None
    top_logprobs: Tensor | None
    num_emitted: Tensor | None = None
    drafts: Tensor | None = None
    confidences: Tensor | None = None
    confidence_logits: Tensor | None = None
    ends: np.ndarray | None = None

    def tensors(self) -> dict[str, Tensor]:
        """What has to be copied, by name."""
        names = (field.name for field in dataclasses.fields(self))
        return {name: value for name in names if isinstance(value := getattr(self, name), Tensor)}

    def result(self, copies: Mapping[str, Tensor], device_ms: float = 0.0) -> StepResult:
        """The result, from finished copies of `tensors()` on the host."""
        given = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        arrays = {name: copy.numpy() for name, copy in copies.items()}
        return StepResult(**{**given, **arrays}, device_ms=device_ms)

    def fetch(self) -> StepResult:
        """The result, when the device has made it."""
        return self.result({name: value.cpu() for name, value in self.tensors().items()})
