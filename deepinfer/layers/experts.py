"""Experts: the routed expert matrices of one layer, in the form that a device multiplies.

form            holds                                     on
Experts         exact values, bfloat16 or float32         CPU
PackedExperts   E2M1 codes and scales of some, packed     GPU
CodesExperts    the same, packed for products in FP8      GPU that has them, activations in FP8
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from deepinfer.config import Arithmetic
from deepinfer.layers.inputs import Inputs
from deepinfer.ops.experts import routed_experts
from deepinfer.utils.aside import Aside
from tilelang_ops.common.expert_packing import weight_codes, weight_codes_shape
from tilelang_ops.gemm import (
    grouped_linear_mxfp4,
    grouped_linear_w4a8,
    grouped_swiglu_mxfp4,
    grouped_swiglu_w4a8,
)
from tilelang_ops.moe import SlotOutputs, combine_slots, gather_codes, gather_grouped
from tilelang_ops.projection import encode_units, round_rows


class RoutedExperts(Protocol):
    """What every form offers."""

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


@dataclass(frozen=True)
class CodesExperts:
    """The same experts for products in FP8.

    Attributes:
        w13: [E, ..] int32 and
        w13_references: [E, ..] float32 of `expert_packing.pack_experts(.., gated=True)`.
        w2: [E, ..] int32 and
        w2_references: [E, ..] float32 of `expert_packing.pack_experts`.
        hidden, inner, first: as in `PackedExperts`.
        copies: of w13 and w2 code by code, which are faster for many rows, with the same bits; empty until
            `copy_codes`.
    """

    w13: Tensor
    w13_references: Tensor
    w2: Tensor
    w2_references: Tensor
    hidden: int
    inner: int
    first: int = 0
    copies: list[Tensor] = field(default_factory=list)

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
        assert arithmetic.fp8_products, "these experts are for products in FP8"
        rows = encode_units(x) if isinstance(x, Tensor) else x.codes
        assert rows is not None, "the rows are not at hand by their codes"
        ids = expert_ids if self.first == 0 else expert_ids - self.first
        grouped = gather_codes(rows, expert_weights, ids, self.w13.shape[0])
        w13_codes, w2_codes = self.copies or (None, None)
        product = grouped_swiglu_w4a8(
            grouped.rows,
            self.w13,
            self.w13_references,
            grouped.offsets,
            grouped.factors,
            limit,
            self.inner,
            w13_codes,
        )
        outputs = grouped_linear_w4a8(
            product, self.w2, self.w2_references, grouped.offsets, self.hidden, w2_codes
        )
        if shared is None:
            return combine_slots(outputs, grouped.places, None, None, torch.float32)
        return SlotOutputs(outputs, grouped.places, shared.result())


def copy_codes(experts: Sequence[CodesExperts], most_bytes: int) -> bool:
    """Copy the weights of experts code by code, if all of them fit.

    Args:
        experts: of all layers.
        most_bytes: that the copies may take.

    Returns:
        Whether they are there.
    """
    weights = [(each, weight) for each in experts for weight in (each.w13, each.w2)]
    if sum(math.prod(weight_codes_shape(weight)) for _, weight in weights) > most_bytes:
        return False
    for each, weight in weights:
        each.copies.append(weight_codes(weight))
    return True
