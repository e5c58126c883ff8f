"""Take the last positions out of a slot's rings."""

from tilelang_ops.kv_cache.select_state_slice.op import select_state_slice

__all__ = ["select_state_slice"]
