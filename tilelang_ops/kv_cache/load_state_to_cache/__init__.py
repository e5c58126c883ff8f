"""Put positions back into a slot's rings."""

from tilelang_ops.kv_cache.load_state_to_cache.op import load_state_to_cache

__all__ = ["load_state_to_cache"]
