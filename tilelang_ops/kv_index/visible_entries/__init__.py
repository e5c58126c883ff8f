"""All entries that a row sees."""

from tilelang_ops.kv_index.visible_entries.op import visible_entries

__all__ = ["visible_entries"]
