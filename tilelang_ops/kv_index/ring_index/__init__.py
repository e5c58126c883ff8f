"""Record numbers of positions in rings."""

from tilelang_ops.kv_index.ring_index.op import ring_index

__all__ = ["ring_index"]
