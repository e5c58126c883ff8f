"""Pretended prefill: a model whose prompts cost nothing, to measure what comes after them.

The caches are full of random records before (`runtime.random_caches`), so a prompt that is not computed
leaves what a computed one would: records of the right formats in its blocks and rings.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deepinfer.models.base import ForwardOutput, LayerGate, ModelSpec
from deepinfer.models.deepseek_v41.model import DeepseekV41Model
from deepinfer.runtime.batch import Batch
from deepinfer.runtime.caches import Caches


@dataclass
class PretendedPrefill:
    """The backbone, and while `is_on` nothing in its place in prefill steps.

    Attributes:
        model: what runs otherwise, and answers everything else.
    """

    model: DeepseekV41Model
    is_on: bool = False

    def __getattr__(self, name: str) -> Any:
        if name == "model":  # not set yet, while a copy is made
            raise AttributeError(name)
        return getattr(self.model, name)

    @property
    def spec(self) -> ModelSpec:
        """The model's."""
        return self.model.spec

    def forward(
        self, batch: Batch, caches: Caches, want_features: bool = False, gate: LayerGate | None = None
    ) -> ForwardOutput:
        """As the model's; of a pretended prefill the states are all ones, and there are no features."""
        if not (self.is_on and batch.is_prefill):
            return self.model.forward(batch, caches, want_features=want_features, gate=gate)
        if gate is not None:
            gate.finish()
        config = self.model.config
        states = torch.ones(
            batch.output_rows.shape[0],
            config.hidden_size,
            dtype=getattr(torch, self.model.arithmetic.compute_dtype),
            device=batch.input_ids.device,
        )
        if not want_features:
            return ForwardOutput(states)
        width = len(config.dspark_target_layer_ids) * config.hidden_size
        return ForwardOutput(states, states.new_empty(0, width), batch.row_seq[:0].long())

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """As the model's."""
        return self.model.compute_logits(hidden_states)
