"""Mixture of experts: a router, the routed experts it chooses, and the shared expert of every row."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.config import Arithmetic
from deepinfer.layers.experts import RoutedExperts
from deepinfer.layers.inputs import Inputs
from deepinfer.layers.linear import Projection
from deepinfer.models.deepseek_v41.config import DeepseekV41Config
from deepinfer.models.deepseek_v41.weights import Weights
from deepinfer.utils.aside import aside
from tilelang_ops.common.row_codes import RowCodes
from tilelang_ops.moe import SlotOutputs, route_topk, swiglu, swiglu_quantize


@dataclass(frozen=True)
class MoE:
    """One layer's experts.

    Attributes:
        gate: [experts, hidden], the router.
        bias: [experts] float32, joins the choice of experts and not their weights.
        image_bias: [experts] float32, takes its place for tokens of images.
        experts: the routed experts.
        shared_w13: [2 * inner, hidden] of the shared expert: the rows of w1 (gate), then those of w3 (up).
        shared_w2: [hidden, inner].
    """

    gate: Projection
    bias: Tensor
    image_bias: Tensor
    experts: RoutedExperts
    shared_w13: Projection
    shared_w2: Projection
    num_selected: int
    routed_scale: float
    limit: float
    arithmetic: Arithmetic

    @classmethod
    def load(
        cls,
        weights: Weights,
        prefix: str,
        config: DeepseekV41Config,
        arithmetic: Arithmetic,
        *,
        num_experts: int,
        num_selected: int,
    ) -> MoE:
        """Read the tensors under `prefix` ("layers.0.ffn"); the drafter's layers have their own numbers."""
        shared = f"{prefix}.shared_experts"
        return cls(
            gate=weights.linear(f"{prefix}.gate"),
            bias=weights.tensor(f"{prefix}.gate.bias", torch.float32),
            image_bias=weights.tensor(f"{prefix}.gate.bias_vl", torch.float32),
            experts=weights.experts(f"{prefix}.experts", num_experts),
            shared_w13=weights.linear(f"{shared}.w1", f"{shared}.w3"),
            shared_w2=weights.linear(f"{shared}.w2"),
            num_selected=num_selected,
            routed_scale=config.routed_scaling_factor,
            limit=config.swiglu_limit,
            arithmetic=arithmetic,
        )

    def __call__(self, x: Tensor | Inputs, is_image: Tensor | None = None) -> Tensor | SlotOutputs:
        """Routed and shared experts of every row, added in float32 and rounded once.

        Args:
            x: [n, hidden] compute dtype, the normalised input.
            is_image: [n] bool, tokens of images; None when there is none.

        Returns:
            [n, hidden], the dtype of `x`, or on a device what adds up to it.
        """
        shared = aside(x.device, self.shared, x)
        ids, weights = self.route(x, is_image)
        return self.experts(x, ids, weights, self.limit, self.arithmetic, shared)

    def route(self, x: Tensor | Inputs, is_image: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Chosen experts [n, k] int32, best first, and their weights [n, k] float32."""
        logits = self.gate(x, self.arithmetic, torch.float32)
        return route_topk(logits, self.bias, self.num_selected, self.routed_scale, self.image_bias, is_image)

    def shared(self, x: Tensor | Inputs) -> Tensor:
        """The shared expert's output [n, hidden], the dtype of `x`."""
        gate_up = self.shared_w13(x, self.arithmetic)
        if not (isinstance(x, Inputs) and self.arithmetic.quantize_activations):
            return self.shared_w2(swiglu(gate_up, self.limit, gate_up.dtype), self.arithmetic)
        if self.arithmetic.fp8_products:
            product = Inputs(None, codes=RowCodes(*swiglu_quantize(gate_up, self.limit, in_units=True)))
        else:
            product = Inputs(None, swiglu(gate_up, self.limit, gate_up.dtype, rounds=True))
        return self.shared_w2(product, self.arithmetic)
