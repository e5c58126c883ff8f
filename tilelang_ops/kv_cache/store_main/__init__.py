"""Store compressed KV as records."""

from tilelang_ops.kv_cache.store_main.op import store_main

__all__ = ["store_main"]
