"""What happens to a projection before it is used as query, key or value."""

from tilelang_ops.projection.rotate import rotate

__all__ = ["rotate"]
