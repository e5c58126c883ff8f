"""Record numbers of runs of positions."""

from tilelang_ops.kv_index.range_index.op import paged_range_index, ring_range_index

__all__ = ["paged_range_index", "ring_range_index"]
