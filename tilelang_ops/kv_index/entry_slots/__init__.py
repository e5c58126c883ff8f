"""Record numbers of compressed entries."""

from tilelang_ops.kv_index.entry_slots.op import entry_slots

__all__ = ["entry_slots"]
