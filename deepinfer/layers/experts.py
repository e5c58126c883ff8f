"""Experts: the routed expert matrices of one layer."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from deepinfer.config import Arithmetic
from deepinfer.ops.experts import routed_experts


@dataclass(frozen=True)
class Experts:
    """All experts of a layer, stacked.

    Attributes:
        w13: [E, 2 * I, H] bfloat16 or float32, the rows of w1 (gate), then those of w3 (up).
        w2: [E, H, I], like `w13`.
        quantized: the checkpoint stores them with scales.
    """

    w13: Tensor
    w2: Tensor
    quantized: bool = True

    def __call__(
        self, x: Tensor, expert_ids: Tensor, expert_weights: Tensor, limit: float, arithmetic: Arithmetic
    ) -> Tensor:
        """[M, H] with [M, k] ids (int32) and weights (float32) -> [M, H] float32, slots summed in order."""
        return routed_experts(
            x,
            expert_ids,
            expert_weights,
            self.w13,
            self.w2,
            limit,
            round_inputs=self.quantized and arithmetic.quantize_activations,
        )
