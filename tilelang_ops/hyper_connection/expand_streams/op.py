"""Add a sublayer's output to the residual streams, which mix among themselves."""

from __future__ import annotations

from torch import Tensor

from tilelang_ops.common.dispatch import backend


def expand_streams(streams: Tensor, output: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """`new[j] = sum_i comb[i, j] * streams[i] + post[j] * output`, in float32, rounded once.

    The sum runs over i in ascending order and the output comes last.

    Args:
        streams: [n, m, width] float32 or bfloat16, contiguous.
        output: [n, width], the dtype of `streams`.
        post: [n, m] float32.
        comb: [n, m, m] float32; first index the old stream, second the new one.

    Returns:
        [n, m, width], the dtype of `streams`.
    """
    num_rows, num_streams, width = streams.shape
    assert streams.is_contiguous() and output.shape == (num_rows, width), f"{streams.shape=} {output.shape=}"
    assert comb.shape == (num_rows, num_streams, num_streams), f"{streams.shape=} {comb.shape=}"
    return backend(__package__, streams.device).run(streams, output, post, comb)
