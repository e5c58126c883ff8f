"""Linear: one weight matrix of the model, in the form that a device multiplies.

    form          holds                                   on
    Linear        exact values, bfloat16 or float32       CPU
    Fp8Linear     E4M3 codes and scales, packed           GPU, matrices that are stored with scales
    CodesLinear   E4M3 codes with a scale for 32 x 128    GPU, the same where the arithmetic has FP8 products
    DenseLinear   bfloat16 terms whose sum is exact       GPU, the others

All are called alike. Inputs of matrices that are stored with scales are rounded to E4M3 where the arithmetic
says so: `Linear` does it in its product, the others in front, unless they are handed `Inputs`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from deepinfer.config import Arithmetic
from deepinfer.layers.inputs import Inputs
from deepinfer.ops.gemm import grouped_columns, linear
from tilelang_ops import gemm
from tilelang_ops.projection import encode_units, round_rows


class Projection(Protocol):
    """What every form offers."""

    @property
    def columns(self) -> int:
        """N."""

    def __call__(
        self,
        x: Tensor | Inputs,
        arithmetic: Arithmetic,
        out_dtype: torch.dtype | None = None,
        *,
        is_rounded: bool = False,
    ) -> Tensor:
        """Multiply rows by the weight's transpose.

        Args:
            x: [M, K] float32 or bfloat16.
            arithmetic: whether inputs of quantised matrices are rounded, and who chooses the order of sums.
            out_dtype: that of `x` when None.
            is_rounded: the inputs are E4M3 values with scales already.

        Returns:
            [M, N] `out_dtype`; accumulated in float32, rounded once.
        """

    def by_group(self, x: Tensor | Inputs, arithmetic: Arithmetic) -> Tensor:
        """[M, G, K], or Inputs [M, G * K] -> [M, G, N / G]: the weight's rows in G blocks, one for each group
        of columns."""


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

    @property
    def columns(self) -> int:
        """N."""
        return self.weight.shape[0]

    @cached_property
    def wide(self) -> Tensor:
        """The weight in float32, which the library's product needs."""
        return self.weight.float()

    def __call__(
        self,
        x: Tensor | Inputs,
        arithmetic: Arithmetic,
        out_dtype: torch.dtype | None = None,
        *,
        is_rounded: bool = False,
    ) -> Tensor:
        """As `Projection`."""
        assert isinstance(x, Tensor), f"{self.name} takes rows as they are"
        return linear(
            x,
            self.weight if arithmetic.batch_invariant else self.wide,
            out_dtype,
            round_inputs=self.quantized and arithmetic.quantize_activations and not is_rounded,
            batch_invariant=arithmetic.batch_invariant,
        )

    def by_group(self, x: Tensor | Inputs, arithmetic: Arithmetic) -> Tensor:
        """As `Projection`."""
        assert isinstance(x, Tensor), f"{self.name} takes rows as they are"
        return grouped_columns(
            x,
            self.weight if arithmetic.batch_invariant else self.wide,
            round_inputs=self.quantized and arithmetic.quantize_activations,
            batch_invariant=arithmetic.batch_invariant,
        )


@dataclass(frozen=True)
class Fp8Linear:
    """A matrix of E4M3 codes with a scale for 32 x 32; inputs and outputs are bfloat16.

    Attributes:
        packed: [num_groups, ..] int32 of `packing.pack_fp8`.
        columns: N.
        num_groups: groups of columns in `by_group`; a plain product has one.
        name: the checkpoint's name without its suffix, for messages.
    """

    packed: Tensor
    columns: int
    num_groups: int
    name: str

    def __call__(
        self,
        x: Tensor | Inputs,
        arithmetic: Arithmetic,
        out_dtype: torch.dtype | None = None,
        *,
        is_rounded: bool = False,
    ) -> Tensor:
        """As `Projection`."""
        assert self.num_groups == 1 and out_dtype in (None, torch.bfloat16), f"{self.name} {out_dtype=}"
        return gemm.linear_fp8(_rounded(x, arithmetic, is_rounded), self.packed, self.columns)

    def by_group(self, x: Tensor | Inputs, arithmetic: Arithmetic) -> Tensor:
        """As `Projection`."""
        rows = _rounded(x, arithmetic, False).flatten(1)
        columns = self.columns // self.num_groups
        out = gemm.linear_fp8(rows, self.packed, columns, num_groups=self.num_groups)
        return out.unflatten(1, (self.num_groups, columns))


@dataclass(frozen=True)
class CodesLinear:
    """A matrix of E4M3 codes whose products are FP8's; outputs are bfloat16.

    Attributes:
        weight: [num_groups, N / num_groups, K] uint8 and
        scales: [num_groups, ..] float32 of `dense_packing.pack_units`.
        name: the checkpoint's name without its suffix, for messages.
    """

    weight: Tensor
    scales: Tensor
    name: str

    @property
    def columns(self) -> int:
        """N."""
        return self.weight.shape[0] * self.weight.shape[1]

    def __call__(
        self,
        x: Tensor | Inputs,
        arithmetic: Arithmetic,
        out_dtype: torch.dtype | None = None,
        *,
        is_rounded: bool = False,
    ) -> Tensor:
        """As `Projection`; rows that are rounded are encoded all the same."""
        assert out_dtype in (None, torch.bfloat16), f"{self.name} {out_dtype=}"
        rows = x.codes if isinstance(x, Inputs) else encode_units(x)
        assert rows is not None, f"{self.name} takes codes, and the rows are not at hand as such"
        return gemm.linear_w8a8(
            rows.codes, rows.scales, self.weight, self.scales, num_groups=self.weight.shape[0]
        )

    def by_group(self, x: Tensor | Inputs, arithmetic: Arithmetic) -> Tensor:
        """As `Projection`."""
        return self(x, arithmetic).unflatten(1, self.weight.shape[:2])


@dataclass(frozen=True)
class DenseLinear:
    """A matrix without scales; inputs are bfloat16.

    Attributes:
        weight: [num_parts * N, K] bfloat16; three parts of `packing.split_float32` are a float32 matrix.
        num_parts: terms that the matrix is the sum of.
        name: the checkpoint's name without its suffix, for messages.
    """

    weight: Tensor
    num_parts: int
    name: str

    @property
    def columns(self) -> int:
        """N."""
        return self.weight.shape[0] // self.num_parts

    def __call__(
        self,
        x: Tensor | Inputs,
        arithmetic: Arithmetic,
        out_dtype: torch.dtype | None = None,
        *,
        is_rounded: bool = False,
    ) -> Tensor:
        """As `Projection`."""
        rows = x if isinstance(x, Tensor) else x.values
        assert rows is not None, f"{self.name} takes rows that are not rounded"
        return gemm.linear(rows, self.weight, out_dtype or rows.dtype, num_parts=self.num_parts)

    def by_group(self, x: Tensor | Inputs, arithmetic: Arithmetic) -> Tensor:
        """Never: `Weights.linear` refuses grouped columns that are stored without scales, by their name."""
        raise AssertionError(f"{self.name} has no groups of columns")


def _rounded(x: Tensor | Inputs, arithmetic: Arithmetic, is_rounded: bool) -> Tensor:
    """Rows as an FP8 product takes them."""
    if isinstance(x, Inputs):
        rows = x.rounded if arithmetic.quantize_activations else x.values
        assert rows is not None, "the rows are not at hand in the form that the product takes"
        return rows
    return round_rows(x) if arithmetic.quantize_activations and not is_rounded else x
