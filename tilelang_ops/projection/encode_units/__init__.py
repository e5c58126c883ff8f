"""Encode row vectors for products in FP8."""

from tilelang_ops.projection.encode_units.op import encode_units

__all__ = ["encode_units"]
