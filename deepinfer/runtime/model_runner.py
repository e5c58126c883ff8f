"""ModelRunner: one step on one device, forward -> logits -> sample, in that order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deepinfer.models.base import Model
from deepinfer.runtime.batch_builder import BatchBuilder
from deepinfer.runtime.caches import Caches
from deepinfer.sampling.inputs import SamplingInputs
from deepinfer.sampling.sampler import Sampler, SampleResult
from deepinfer.utils.timer import Timers

# Bytes of float32 logits that a step holds at once; rows beyond are sampled in slices.
LOGITS_BYTES = 256 << 20


@dataclass(frozen=True)
class StepResult:
    """What a step decided, on the host; R output rows. Arrays that no row asked for are None."""

    token_ids: np.ndarray  # [R] int32
    faults: np.ndarray  # [R] uint8, 0 where the row is sound
    logprobs: np.ndarray | None  # [R] float32
    ranks: np.ndarray | None  # [R] int32
    top_ids: np.ndarray | None  # [R, K] int32
    top_logprobs: np.ndarray | None  # [R, K] float32

    def as_arrays(self) -> dict[str, np.ndarray | None]:
        """Arguments of the core's `commit`."""
        return {
            "tokens": self.token_ids,
            "logprobs": self.logprobs,
            "ranks": self.ranks,
            "top_ids": self.top_ids,
            "top_logprobs": self.top_logprobs,
            "faults": self.faults,
        }


class ModelRunner:
    """Runs plans on a loaded model."""

    def __init__(self, model: Model, caches: Caches, sampler: Sampler, builder: BatchBuilder) -> None:
        self._model = model
        self._caches = caches
        self._sampler = sampler
        self._builder = builder

    @torch.inference_mode()
    def run(self, plan: Any, timers: Timers) -> StepResult:
        """Run one step.

        Args:
            plan: a `_core.StepPlan`.
            timers: takes the host's time of the sections build, forward and sample.

        Returns:
            The sampled tokens (and what else was asked for) of the plan's output rows.
        """
        with timers.timed("build"):
            batch = self._builder.batch(plan)
        with timers.timed("forward"):
            hidden = self._model.forward(batch, self._caches).hidden_states
        with timers.timed("build"):
            inputs = self._builder.sampling(plan)
        with timers.timed("sample"):
            return self._sample(hidden, inputs)

    def _sample(self, hidden: Tensor, inputs: SamplingInputs) -> StepResult:
        num_rows = hidden.shape[0]
        rows = max(1, LOGITS_BYTES // (4 * self._model.spec.vocab_size))
        if num_rows <= rows:
            return _to_host([self._sampler.sample(self._model.compute_logits(hidden), inputs)])
        parts = []
        for start in range(0, num_rows, rows):
            stop = min(start + rows, num_rows)
            logits = self._model.compute_logits(hidden[start:stop])
            parts.append(self._sampler.sample(logits, inputs.slice(start, stop)))
        return _to_host(parts)


def _to_host(parts: list[SampleResult]) -> StepResult:
    """One StepResult of the slices' results."""
    columns = max((part.top_ids.shape[1] for part in parts if part.top_ids is not None), default=0)

    def joined(name: str) -> np.ndarray | None:
        tensors = [getattr(part, name) for part in parts]
        if all(tensor is None for tensor in tensors):
            return None
        kind = next(tensor for tensor in tensors if tensor is not None)
        rows = [
            part.token_ids.new_zeros((part.token_ids.shape[0], *kind.shape[1:]), dtype=kind.dtype)
            if tensor is None
            else tensor
            for part, tensor in zip(parts, tensors, strict=True)
        ]
        if kind.dim() == 2:
            rows = [torch.nn.functional.pad(row, (0, columns - row.shape[1])) for row in rows]
        return (rows[0] if len(rows) == 1 else torch.cat(rows)).cpu().numpy()

    return StepResult(
        **{
            name: joined(name)
            for name in ("token_ids", "faults", "logprobs", "ranks", "top_ids", "top_logprobs")
        }
    )
