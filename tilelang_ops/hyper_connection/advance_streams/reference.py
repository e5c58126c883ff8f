"""Torch meaning of `advance_streams`: the operators that it fuses, one after the other."""

from __future__ import annotations

from torch import Tensor

from tilelang_ops.hyper_connection.collapse_streams import reference as collapse
from tilelang_ops.hyper_connection.expand_streams import reference as expand


def run(
    streams: Tensor, pre: Tensor, output: Tensor | None, post: Tensor | None, comb: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    if output is not None:
        streams = expand.run(streams, output, post, comb)
    mean_square = streams.float().flatten(1).square().mean(-1)
    return streams, collapse.run(streams, pre), mean_square
