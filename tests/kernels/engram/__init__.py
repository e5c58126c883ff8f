"""Kernels of `tilelang_ops.engram`."""
