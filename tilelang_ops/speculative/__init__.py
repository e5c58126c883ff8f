"""Speculation: how many drafts a sequence verifies, and what verification leaves."""

from tilelang_ops.speculative.redistribute import redistribute

__all__ = ["redistribute"]
