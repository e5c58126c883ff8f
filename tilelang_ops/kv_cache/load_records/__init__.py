"""Read records as vectors."""

from tilelang_ops.kv_cache.load_records.op import load_records

__all__ = ["load_records"]
