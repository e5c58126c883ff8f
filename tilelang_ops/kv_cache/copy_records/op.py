"""Copy records between pools without touching their values."""

from __future__ import annotations

from torch import Tensor

from tilelang_ops.common.dispatch import backend


def copy_records(src: Tensor, src_index: Tensor, dst: Tensor, dst_index: Tensor) -> None:
    """`dst[dst_index] = src[src_index]`, record by record; a pair with a -1 on either side is left out.

    Args:
        src, dst: [parts, records, fields] of one dtype and record size; strided; not overlapping.
        src_index, dst_index: [n] int64 record numbers; those of `dst` are distinct.
    """
    assert src.shape[2] == dst.shape[2] and src.dtype == dst.dtype, f"{src.shape=} {dst.shape=}"
    assert src_index.shape == dst_index.shape, f"{src_index.shape=} {dst_index.shape=}"
    if src_index.numel() > 0:
        backend(__package__, src.device).run(src, src_index, dst, dst_index)
