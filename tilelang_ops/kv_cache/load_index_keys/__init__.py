"""Read index keys as vectors."""

from tilelang_ops.kv_cache.load_index_keys.op import load_index_keys

__all__ = ["load_index_keys"]
