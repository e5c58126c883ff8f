"""Operators of `tilelang_ops.moe`."""
