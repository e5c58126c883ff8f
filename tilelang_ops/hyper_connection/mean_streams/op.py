"""Mean of the residual streams, written into a slice of the drafter's features."""

from __future__ import annotations

from torch import Tensor

from tilelang_ops.common.dispatch import backend


def mean_streams(streams: Tensor, features: Tensor, target: int) -> None:
    """`features[:, target * width : (target + 1) * width] = mean of the m streams`, in float32, rounded once.

    Args:
        streams: [n, m, width] float32 or bfloat16, contiguous.
        features: [n, targets * width], the dtype of `streams`, contiguous; one slice is written.
        target: number of the slice.
    """
    num_rows, _, width = streams.shape
    assert streams.is_contiguous() and features.is_contiguous(), f"{streams.stride()=} {features.stride()=}"
    assert features.shape[0] == num_rows and features.shape[1] % width == 0, f"{features.shape=}"
    assert 0 <= target < features.shape[1] // width, f"{target=} {features.shape=}"
    if num_rows > 0:
        backend(__package__, streams.device).run(streams, features, target)
