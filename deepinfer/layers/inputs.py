"""Inputs: rows that several products take, each in its own form."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.layers.rows import take_rows
from tilelang_ops.common.row_codes import RowCodes, scale_shape
from tilelang_ops.memory import gather_columns


@dataclass(frozen=True)
class Inputs:
    """Rows in the forms that products on a device take; at least one of them is there.

    Attributes:
        values: [n, width] bfloat16, for matrices without scales; None when nobody needs them.
        rounded: [n, width] bfloat16, the same rounded to E4M3 in groups of 32, for matrices with scales, or
        codes: what these become for products in FP8; both None where the arithmetic rounds no activations.
    """

    values: Tensor | None
    rounded: Tensor | None = None
    codes: RowCodes | None = None

    @property
    def num_rows(self) -> int:
        """n."""
        return self._rows.shape[0]

    @property
    def device(self) -> torch.device:
        """Where they are."""
        return self._rows.device

    def take(self, places: Tensor) -> Inputs:
        """The rows at `places` ([k] int64)."""

        def taken(part: Tensor | None) -> Tensor | None:
            return None if part is None else take_rows(part, places)

        codes = self.codes
        if codes is not None:
            width = scale_shape(places.shape[0], codes.codes.shape[1])[1]
            scales = gather_columns(codes.scales, places, width)
            codes = RowCodes(take_rows(codes.codes, places), scales)
        return Inputs(taken(self.values), taken(self.rounded), codes)

    @property
    def _rows(self) -> Tensor:
        """A form that is there."""
        if self.codes is not None:
            return self.codes.codes
        rows = self.rounded if self.values is None else self.values
        assert rows is not None
        return rows
