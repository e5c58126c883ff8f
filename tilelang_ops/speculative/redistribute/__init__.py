"""How many drafts each sequence verifies."""

from tilelang_ops.speculative.redistribute.op import redistribute

__all__ = ["redistribute"]
