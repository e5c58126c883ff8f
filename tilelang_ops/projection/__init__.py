"""Rotate channels by position; round vectors; norm, rotation, encoding and store of rows in one pass."""

from tilelang_ops.projection.encode_rows import EncodedRows, Norm, Records, Rotation, encode_rows
from tilelang_ops.projection.rotate.op import rotate
from tilelang_ops.projection.round_rows.op import round_rows

__all__ = ["EncodedRows", "Norm", "Records", "Rotation", "encode_rows", "rotate", "round_rows"]
