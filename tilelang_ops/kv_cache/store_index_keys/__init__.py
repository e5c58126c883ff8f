"""Store index keys in the block-split sections."""

from tilelang_ops.kv_cache.store_index_keys.op import store_index_keys

__all__ = ["store_index_keys"]
