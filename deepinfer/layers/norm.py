"""RMSNorm: root-mean-square normalisation with a weight."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from tilelang_ops.norm import rms_norm


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
