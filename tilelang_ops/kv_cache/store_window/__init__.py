"""Store window KV as records."""

from tilelang_ops.kv_cache.store_window.op import store_window

__all__ = ["store_window"]
