"""Rotary angles: frequencies, plain or interpolated, and a table of cosines and sines by position.

The rotation itself is `tilelang_ops.projection.rotate`. Frequencies and angles are float32 products, as in
the release: at position 10^6 another rounding of a frequency would turn an angle by a hundredth.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.layers.rows import take_rows
from tilelang_ops.memory import gather_rows

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
        self._of_groups: dict[int, tuple[Tensor, Tensor]] = {}

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
        for ratio in self._of_groups:
            self._keep_groups(ratio)

    def rows(self, positions: Tensor, num_positions: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines of positions.

        Args:
            positions: [n] int32 or int64.
            num_positions: a bound that all positions are below, known on the host.

        Returns:
            two float32 [n, width / 2].
        """
        self.reserve(num_positions)
        return take_rows(self._cos, positions), take_rows(self._sin, positions)

    def group_rows(self, positions: Tensor, ratio: int, num_positions: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines at the first position of each position's group of `ratio`; else as `rows`."""
        self.reserve(num_positions)
        self.reserve_groups(ratio)
        cos, sin = self._of_groups[ratio]
        return gather_rows(cos, positions, ratio), gather_rows(sin, positions, ratio)

    def reserve_groups(self, ratio: int) -> None:
        """Hold the angles of groups of `ratio` ready, for `group_rows`."""
        if ratio not in self._of_groups:
            self._keep_groups(ratio)

    def _keep_groups(self, ratio: int) -> None:
        self._of_groups[ratio] = (self._cos[::ratio].contiguous(), self._sin[::ratio].contiguous())


@dataclass(frozen=True)
class RotaryTables:
    """The two kinds of rotation in one model.

    Attributes:
        plain: for layers without compression.
        yarn: interpolated, for layers with compression.
    """

    plain: RotaryTable
    yarn: RotaryTable

    def reserve(self, num_positions: int, ratios: Sequence[int] = ()) -> None:
        """Make both tables hold positions below `num_positions`, `yarn` those of groups of `ratios` too."""
        self.plain.reserve(num_positions)
        self.yarn.reserve(num_positions)
        for ratio in ratios:
            self.yarn.reserve_groups(ratio)
