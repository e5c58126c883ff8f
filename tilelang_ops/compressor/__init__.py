"""Pool groups of tokens into compressed entries."""

from tilelang_ops.compressor.pool_groups import pool_groups

__all__ = ["pool_groups"]
