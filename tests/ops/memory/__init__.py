"""Operators of `tilelang_ops.memory`."""
