"""Kernels of `tilelang_ops.memory`."""
