"""Best entries of each row."""

from tilelang_ops.kv_index.select_entries.op import select_entries

__all__ = ["select_entries"]
