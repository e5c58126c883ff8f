"""Operators of `tilelang_ops.hyper_connection`."""
