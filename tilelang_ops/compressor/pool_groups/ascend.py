"""pool_groups on Ascend: the blocks of the CUDA kernel on the vector cores."""

from tilelang_ops.compressor.pool_groups.cuda import run

__all__ = ["run"]
