"""Sparse attention over window and compressed records."""

from tilelang_ops.attention.sparse_attention.op import sparse_attention

__all__ = ["sparse_attention"]
