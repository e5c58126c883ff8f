"""Linear: one weight matrix of the model, as it is multiplied."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.config import Arithmetic
from deepinfer.ops.gemm import grouped_columns, linear


@dataclass(frozen=True)
class Linear:
    """A weight and how its inputs are rounded.

    Attributes:
        weight: [N, K] float32, exact values of the checkpoint's matrix.
        quantized: the checkpoint stores it with scales; its inputs are rounded where activations are.
        name: the checkpoint's name without its suffix, for messages.
    """

    weight: Tensor
    quantized: bool
    name: str

    def __call__(self, x: Tensor, arithmetic: Arithmetic, out_dtype: torch.dtype | None = None) -> Tensor:
        """[M, K] -> [M, N] of `out_dtype` (`x.dtype` when None); float32 accumulation, rounded once."""
        return linear(
            x,
            self.weight,
            out_dtype,
            round_inputs=self.quantized and arithmetic.quantize_activations,
            batch_invariant=arithmetic.batch_invariant,
        )

    def by_group(self, x: Tensor, arithmetic: Arithmetic, out_dtype: torch.dtype | None = None) -> Tensor:
        """[M, G, K] -> [M, G, N / G]: the weight's rows in G blocks, one for each group of columns."""
        return grouped_columns(
            x,
            self.weight,
            out_dtype,
            round_inputs=self.quantized and arithmetic.quantize_activations,
            batch_invariant=arithmetic.batch_invariant,
        )
