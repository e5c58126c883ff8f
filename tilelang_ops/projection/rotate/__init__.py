"""Rotate the last channels by position."""

from tilelang_ops.projection.rotate.op import rotate

__all__ = ["rotate"]
