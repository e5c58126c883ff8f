"""Pool groups of tokens and keep what open groups need."""

from tilelang_ops.compressor.pool_groups.op import pool_groups

__all__ = ["pool_groups"]
