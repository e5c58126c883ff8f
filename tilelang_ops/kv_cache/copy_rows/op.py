"""Copy whole blocks or slots within a pool."""

from __future__ import annotations

from torch import Tensor

from tilelang_ops.common.dispatch import backend


def copy_rows(pool: Tensor, pairs: Tensor) -> None:
    """`pool[target] = pool[source]` for every pair; all sources are read before any target is written.

    Args:
        pool: [rows, bytes] uint8, contiguous.
        pairs: [n, 2] int32 of (source, target); targets are distinct.
    """
    assert pool.is_contiguous() and pairs.shape[1] == 2, f"{pool.stride()=} {pairs.shape=}"
    if pairs.shape[0] > 0:
        backend(__package__, pool.device).run(pool, pairs)
