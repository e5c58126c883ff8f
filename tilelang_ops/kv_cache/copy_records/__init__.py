"""Copy records between pools."""

from tilelang_ops.kv_cache.copy_records.op import copy_records

__all__ = ["copy_records"]
