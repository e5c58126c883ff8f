"""Operators: `deepinfer.ops` and the families of `tilelang_ops`."""
