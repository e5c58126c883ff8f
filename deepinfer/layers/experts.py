"""Experts: the routed expert matrices of one layer, in the form that a device multiplies.

form            holds                                     on
Experts         exact values, bfloat16 or float32         CPU
PackedExperts   E2M1 codes and scales of some, packed     GPU
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from deepinfer.config import Arithmetic
from deepinfer.layers.inputs import Inputs
from deepinfer.ops.experts import routed_experts
from deepinfer.utils.aside import Aside
from tilelang_ops.gemm import grouped_linear_mxfp4, grouped_swiglu_mxfp4
from tilelang_ops.moe import SlotOutputs, combine_slots, gather_grouped
from tilelang_ops.projection import round_rows


class RoutedExperts(Protocol):
    """What both forms offer."""

    def __call__(
        self,
        x: Tensor | Inputs,
        expert_ids: Tensor,
        expert_weights: Tensor,
        limit: float,
        arithmetic: Arithmetic,
        shared: Aside[Tensor] | None = None,
    ) -> Tensor | SlotOutputs:
        """The outputs of each row's experts and of the shared one, added in float32 in order, rounded once.

        Args:
            x: [M, H].
            expert_ids: [M, k] int32.
            expert_weights: [M, k] float32.
            limit: bound of the activations.
            arithmetic: whether inputs are rounded.
            shared: [M, H] the shared expert's output, the dtype of `x`, added last;
                None for none.

        Returns:
            [M, H] the dtype of `x`, or what adds up to it; float32 without `shared`.
        """


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
        self,
        x: Tensor | Inputs,
        expert_ids: Tensor,
        expert_weights: Tensor,
        limit: float,
        arithmetic: Arithmetic,
        shared: Aside[Tensor] | None = None,
    ) -> Tensor:
        """As `RoutedExperts`."""
        assert isinstance(x, Tensor), "these experts take rows as they are"
        routed = routed_experts(
            x,
            expert_ids,
            expert_weights,
            self.w13,
            self.w2,
            limit,
            round_inputs=self.quantized and arithmetic.quantize_activations,
        )
        return routed if shared is None else (routed + shared.result()).to(x.dtype)


@dataclass(frozen=True)
class PackedExperts:
    """The experts `first ... first + E - 1` of a layer, all of them or a rank's; slots of others add nothing.

    Attributes:
        w13: [E, ..] int32 of `packing.pack_mxfp4(.., gated=True)`.
        w2: [E, ..] int32 of `packing.pack_mxfp4`.
        hidden: H.
        inner: I.
        first: id of the first resident expert.
    """

    w13: Tensor
    w2: Tensor
    hidden: int
    inner: int
    first: int = 0

    def __call__(
        self,
        x: Tensor | Inputs,
        expert_ids: Tensor,
        expert_weights: Tensor,
        limit: float,
        arithmetic: Arithmetic,
        shared: Aside[Tensor] | None = None,
    ) -> Tensor | SlotOutputs:
        """As `RoutedExperts`; every size is a bound made from shapes, nothing waits for the device."""
        rounds = arithmetic.quantize_activations
        if isinstance(x, Inputs):
            rows = (x.rounded if x.codes is None else x.codes) if rounds else x.values
        else:
            rows = round_rows(x) if rounds else x
        assert rows is not None, "the rows are not at hand in the form that the experts take"
        ids = expert_ids if self.first == 0 else expert_ids - self.first
        grouped = gather_grouped(rows, expert_weights, ids, self.w13.shape[0])
        product = grouped_swiglu_mxfp4(
            grouped.rows,
            self.w13,
            grouped.offsets,
            grouped.factors,
            limit,
            self.inner,
            round_output=rounds,
        )
        outputs = grouped_linear_mxfp4(product, self.w2, grouped.offsets, self.hidden)
        if shared is None:
            return combine_slots(outputs, grouped.places, None, None, torch.float32)
        return SlotOutputs(outputs, grouped.places, shared.result())
