"""One pass over the residual streams between two sublayers."""

from __future__ import annotations

from torch import Tensor

from tilelang_ops.common.dispatch import backend


def advance_streams(
    streams: Tensor,
    pre: Tensor,
    output: Tensor | None = None,
    post: Tensor | None = None,
    comb: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Add the pending output of the last sublayer, collapse for the next one, and measure the streams.

    A fusion: `expand_streams` when `output` is given, then `collapse_streams` and the mean square of every
    row's streams. The collapse reads the streams as they are stored, rounded.

    Args:
        streams: [n, m, width] float32 or bfloat16, contiguous.
        pre: [n, m] float32, the mix that the last sublayer's coefficients left for this one.
        output, post, comb: as in `expand_streams`; None when the streams hold everything already.

    Returns:
        streams [n, m, width] and collapsed [n, width] of the dtype of `streams`, mean square [n] float32.
    """
    assert streams.is_contiguous() and pre.shape == streams.shape[:2], f"{streams.shape=} {pre.shape=}"
    return backend(__package__, streams.device).run(streams, pre, output, post, comb)
