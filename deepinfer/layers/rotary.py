"""Rotary angles: frequencies, plain or interpolated, and a table of cosines and sines by position.

The rotation itself is `tilelang_ops.projection.rotate`. Frequencies and angles are float32 products, as in
the release: at position 10^6 another rounding of a frequency would turn an angle by a hundredth.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

PAGE = 4096  # positions computed together: a value must not depend on how far the table reaches


def plain_frequencies(width: int, theta: float) -> Tensor:
    """Angles per position of the `width / 2` channel pairs: float32 [width / 2], `theta^(-2i / width)`."""
    return 1.0 / (theta ** (torch.arange(0, width, 2, dtype=torch.float32) / width))


def yarn_frequencies(
    width: int, theta: float, factor: float, beta_fast: float, beta_slow: float, original_length: int
) -> Tensor:
    """YaRN: slow pairs are divided by `factor`, fast ones kept, a linear ramp between; no amplitude factor.

    Args:
        width: rotated channels.
        theta: base of the plain frequencies.
        factor: context extension.
        beta_fast, beta_slow: turns over the original context that bound the ramp.
        original_length: positions of the original context.

    Returns:
        float32 [width / 2].
    """
    plain = plain_frequencies(width, theta)

    def pair_of(turns: float) -> float:
        return width * math.log(original_length / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(pair_of(beta_fast)), 0)
    high = min(math.ceil(pair_of(beta_slow)), width - 1)
    ramp = ((torch.arange(width // 2, dtype=torch.float32) - low) / max(high - low, 0.001)).clamp(0, 1)
    return (plain / factor) * ramp + plain * (1 - ramp)


class RotaryTable:
    """Cosines and sines of one kind of rotation, by position; grows by pages when a position needs it."""

    def __init__(self, frequencies: Tensor) -> None:
        """frequencies: float32 [width / 2]; the table lives on its device."""
        self.frequencies = frequencies
        empty = frequencies.new_empty(0, frequencies.shape[0])
        self._cos, self._sin = empty, empty

    @property
    def num_positions(self) -> int:
        """Positions that the table holds."""
        return self._cos.shape[0]

    def reserve(self, num_positions: int) -> None:
        """Make the table hold positions below `num_positions`. Call it before a graph is captured."""
        start = self.num_positions
        if start >= num_positions:
            return
        cos, sin = [self._cos], [self._sin]
        for page in range(start, max(num_positions, 2 * start), PAGE):  # at least doubled: each copy pays off
            positions = torch.arange(page, page + PAGE, dtype=torch.float32, device=self._cos.device)
            angles = positions[:, None] * self.frequencies
            cos.append(angles.cos())
            sin.append(angles.sin())
        self._cos, self._sin = torch.cat(cos), torch.cat(sin)

    def rows(self, positions: Tensor, num_positions: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines of positions.

        Args:
            positions: [n] int32 or int64.
            num_positions: a bound that all positions are below, known on the host.

        Returns:
            two float32 [n, width / 2].
        """
        self.reserve(num_positions)
        return self._cos.index_select(0, positions), self._sin.index_select(0, positions)


@dataclass(frozen=True)
class RotaryTables:
    """The two kinds of rotation in one model.

    Attributes:
        plain: for layers without compression.
        yarn: interpolated, for layers with compression.
    """

    plain: RotaryTable
    yarn: RotaryTable

    def reserve(self, num_positions: int) -> None:
        """Make both tables hold positions below `num_positions`."""
        self.plain.reserve(num_positions)
        self.yarn.reserve(num_positions)
