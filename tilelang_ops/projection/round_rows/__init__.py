"""Round row vectors to a number format."""

from tilelang_ops.projection.round_rows.op import round_rows

__all__ = ["round_rows"]
