"""Copy whole blocks or slots within a pool."""

from tilelang_ops.kv_cache.copy_rows.op import copy_rows

__all__ = ["copy_rows"]
