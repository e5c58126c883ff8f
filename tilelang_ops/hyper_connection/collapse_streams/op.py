"""Mix the residual streams into one vector."""

from __future__ import annotations

from torch import Tensor

from tilelang_ops.common.dispatch import backend


def collapse_streams(streams: Tensor, pre: Tensor) -> Tensor:
    """`sum_i pre[i] * streams[i]` over i in ascending order, in float32, rounded once.

    Args:
        streams: [n, m, width] float32 or bfloat16, contiguous.
        pre: [n, m] float32.

    Returns:
        [n, width], the dtype of `streams`.
    """
    assert streams.is_contiguous() and pre.shape == streams.shape[:2], f"{streams.shape=} {pre.shape=}"
    return backend(__package__, streams.device).run(streams, pre)
