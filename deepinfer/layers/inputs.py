"""Inputs: rows that several products take, each in its own form."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.layers.rows import take_rows


@dataclass(frozen=True)
class Inputs:
    """Rows in the forms that products on a device take; at least one of them is there.

    Attributes:
        values: [n, width] bfloat16, for matrices without scales; None when nobody needs them.
        rounded: [n, width] bfloat16, the same rounded to E4M3 in groups of 32, for matrices with scales; None
            where the arithmetic rounds no activations.
    """

    values: Tensor | None
    rounded: Tensor | None

    @property
    def num_rows(self) -> int:
        """n."""
        rows = self.rounded if self.values is None else self.values
        assert rows is not None
        return rows.shape[0]

    @property
    def device(self) -> torch.device:
        """Where they are."""
        rows = self.rounded if self.values is None else self.values
        assert rows is not None
        return rows.device

    def take(self, places: Tensor) -> Inputs:
        """The rows at `places` ([k] int64)."""
        parts = (self.values, self.rounded)
        return Inputs(*(None if part is None else take_rows(part, places) for part in parts))
