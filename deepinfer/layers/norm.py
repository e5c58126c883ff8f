"""Root-mean-square normalisation with one rounding."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`(x * 1 / sqrt(mean(x^2) + eps)) * weight` in float32, rounded once to the dtype of x.

    A row's bits depend on that row alone.

    Args:
        x: [..., n] float32 or bfloat16.
        weight: [n] float32.
        eps: added to the mean of squares.
    """
    wide = x.float().contiguous()
    scale = wide.square().mean(-1, keepdim=True).add_(eps).sqrt_().reciprocal_()
    return (wide * scale).mul_(weight).to(x.dtype)


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
