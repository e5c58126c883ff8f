"""Attention over records of the cache pools."""

from tilelang_ops.attention.sparse_attention.op import sparse_attention

__all__ = ["sparse_attention"]
