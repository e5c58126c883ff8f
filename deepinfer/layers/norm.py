"""RMSNorm: root-mean-square normalisation with a weight."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from deepinfer.config import Arithmetic
from deepinfer.layers.inputs import Inputs
from tilelang_ops.norm import norm_quantize, rms_norm
from tilelang_ops.projection import Norm


@dataclass(frozen=True)
class RMSNorm:
    """`rms_norm` with a weight from the checkpoint.

    Attributes:
        weight: [n] float32.
        eps: added to the mean of squares.
    """

    weight: Tensor
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        """[..., n] -> [..., n], same dtype."""
        return rms_norm(x, self.weight, self.eps)

    def inputs(self, x: Tensor, arithmetic: Arithmetic) -> Inputs:
        """[m, n] -> the normalised rows, in the form that products with matrices that have scales take."""
        if not arithmetic.quantize_activations:
            return Inputs(self(x))
        encoding = "units" if arithmetic.fp8_products else "rounded"
        normed = norm_quantize(x, self.weight, self.eps, encoding=encoding)
        return Inputs(None, normed.rounded, normed.units)

    @property
    def step(self) -> Norm:
        """This norm as a step of `encode_rows`."""
        return Norm(self.weight, self.eps)
