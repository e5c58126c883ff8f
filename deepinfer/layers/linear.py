"""Linear: one weight matrix of the model, as it is multiplied."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from deepinfer.config import Arithmetic
from deepinfer.ops.gemm import grouped_columns, linear


@dataclass(frozen=True)
class Linear:
    """A weight and how its inputs are rounded.

    Attributes:
        weight: [N, K] bfloat16 or float32, exact values of the checkpoint's matrix.
        quantized: the checkpoint stores it with scales; its inputs are rounded where activations are.
        name: the checkpoint's name without its suffix, for messages.
    """

    weight: Tensor
    quantized: bool
    name: str

    @cached_property
    def wide(self) -> Tensor:
        """The weight in float32, which the library's product needs."""
        return self.weight.float()

    def __call__(
        self,
        x: Tensor,
        arithmetic: Arithmetic,
        out_dtype: torch.dtype | None = None,
        *,
        is_rounded: bool = False,
    ) -> Tensor:
        """Multiply rows by the weight's transpose.

        Args:
            x: [M, K] float32 or bfloat16.
            arithmetic: whether inputs of quantised matrices are rounded, and who chooses the order of sums.
            out_dtype: `x.dtype` when None.
            is_rounded: the inputs are E4M3 values with scales already.

        Returns:
            [M, N] `out_dtype`; accumulated in float32, rounded once.
        """
        return linear(
            x,
            self.weight if arithmetic.batch_invariant else self.wide,
            out_dtype,
            round_inputs=self.quantized and arithmetic.quantize_activations and not is_rounded,
            batch_invariant=arithmetic.batch_invariant,
        )

    def by_group(self, x: Tensor, arithmetic: Arithmetic, out_dtype: torch.dtype | None = None) -> Tensor:
        """[M, G, K] -> [M, G, N / G]: the weight's rows in G blocks, one for each group of columns."""
        return grouped_columns(
            x,
            self.weight if arithmetic.batch_invariant else self.wide,
            out_dtype,
            round_inputs=self.quantized and arithmetic.quantize_activations,
            batch_invariant=arithmetic.batch_invariant,
        )
