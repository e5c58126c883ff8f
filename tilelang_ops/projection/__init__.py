"""Rotate the last channels by position; norm, rotation, encoding and store of rows in one pass."""

from tilelang_ops.projection.encode_rows import EncodedRows, Norm, Records, Rotation, encode_rows
from tilelang_ops.projection.rotate.op import rotate

__all__ = ["EncodedRows", "Norm", "Records", "Rotation", "encode_rows", "rotate"]
