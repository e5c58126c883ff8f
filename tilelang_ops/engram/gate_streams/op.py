"""Add a gated value to every residual stream."""

from __future__ import annotations

import torch
from torch import Tensor

from tilelang_ops.common.dispatch import backend


def gate_streams(
    streams: Tensor, key_value: Tensor, weight: Tensor, eps: float, passes: Tensor | None = None
) -> Tensor:
    """Each stream opens its own gate for the shared value, by its likeness to its key.

        d[i]   = sum_c streams[i, c] * weight[i, c] * key[i, c]
                 / (rms(streams[i]) * rms(key[i]) * sqrt(width))
        gate   = sigmoid(copysign(sqrt(max(|d|, 1e-6)), d))
        new[i] = streams[i] + gate[i] * value                                rounded once

    Args:
        streams: [n, m, width] float32 or bfloat16, contiguous.
        key_value: [n, (m + 1) * width], the dtype of `streams`: m keys, then the value.
        weight: [m, width] float32.
        eps: added to both mean squares.
        passes: [n] bool, rows that stay as they are; None for none.

    Returns:
        [n, m, width], the dtype of `streams`.
    """
    num_rows, num_streams, width = streams.shape
    assert streams.is_contiguous() and weight.shape == (num_streams, width), (
        f"{streams.shape=} {weight.shape=}"
    )
    assert key_value.shape == (num_rows, (num_streams + 1) * width), f"{streams.shape=} {key_value.shape=}"
    assert passes is None or (passes.shape == (num_rows,) and passes.dtype == torch.bool), f"{passes.shape=}"
    return backend(__package__, streams.device).run(streams, key_value, weight, eps, passes)
