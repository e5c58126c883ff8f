"""Embedding: the rows of a vocabulary."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tilelang_ops.memory import gather_dequantize


@dataclass(frozen=True)
class Embedding:
    """One vector for each token id.

    Attributes:
        weight: [vocab, hidden] as stored, bfloat16 or float32.
        dtype: of the vectors that are handed out.
    """

    weight: Tensor
    dtype: torch.dtype

    def __call__(self, token_ids: Tensor) -> Tensor:
        """[n] int32, 0..vocab-1 -> [n, hidden] `dtype`."""
        return gather_dequantize(self.weight, None, token_ids, self.dtype)
