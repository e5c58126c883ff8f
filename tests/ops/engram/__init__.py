"""Operators of `tilelang_ops.engram`."""
