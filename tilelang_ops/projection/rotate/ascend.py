"""rotate on Ascend: the blocks of the CUDA kernel on the vector cores."""

from tilelang_ops.projection.rotate.cuda import run

__all__ = ["run"]
