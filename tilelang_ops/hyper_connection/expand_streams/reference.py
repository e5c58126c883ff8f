"""Torch meaning of `expand_streams`."""

from __future__ import annotations

from torch import Tensor

# Rows up to which one wide product is faster than a pass per stream (which needs a quarter of the memory).
# Both add the streams in the same order, so the choice does not show in the bits.
WIDE_ROWS = 32


def run(streams: Tensor, output: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    old = streams.float()
    if streams.shape[0] <= WIDE_ROWS:
        mixed = (comb.unsqueeze(-1) * old.unsqueeze(2)).sum(1)  # [n, from, to, width] summed over `from`
    else:
        mixed = comb[:, 0, :, None] * old[:, 0, None, :]
        for stream in range(1, old.shape[1]):
            mixed += comb[:, stream, :, None] * old[:, stream, None, :]
    mixed += post.unsqueeze(-1) * output.float().unsqueeze(1)
    return mixed.to(streams.dtype)
