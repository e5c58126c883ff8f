"""Record numbers of the windows of queries."""

from tilelang_ops.kv_index.window_index.op import window_index

__all__ = ["window_index"]
