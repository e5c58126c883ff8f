"""Rotate channels by position; round vectors; norm, rotation, encoding and store of rows in one pass."""

from tilelang_ops.projection.encode_rows import EncodedRows, Norm, Records, Rotation, encode_rows
from tilelang_ops.projection.encode_units.op import encode_units
from tilelang_ops.projection.rotate.op import rotate
from tilelang_ops.projection.round_rows.op import round_rows

__all__ = [
    "EncodedRows",
    "Norm",
    "Records",
    "Rotation",
    "encode_rows",
    "encode_units",
    "rotate",
    "round_rows",
]
