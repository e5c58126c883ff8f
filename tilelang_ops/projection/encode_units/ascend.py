"""encode_units on Ascend: the blocks of the CUDA kernel on the vector cores."""

from tilelang_ops.projection.encode_units.cuda import run

__all__ = ["run"]
