"""Gather columns by number."""

from __future__ import annotations

from torch import Tensor

from tilelang_ops.common.dispatch import backend


def gather_columns(src: Tensor, index: Tensor, width: int) -> Tensor:
    """`out[:, i] = src[:, index[i]]`.

    Args:
        src: [num_rows, n] float32, contiguous.
        index: [k] int64, numbers of columns that there are.
        width: of the result, at least k; columns behind the last are open.

    Returns:
        [num_rows, width] float32.
    """
    assert src.dim() == 2 and src.is_contiguous() and width >= index.shape[0], f"{src.shape=} {width=}"
    if index.shape[0] == 0:
        return src.new_empty(src.shape[0], width)
    return backend(__package__, src.device).run(src, index, width)
