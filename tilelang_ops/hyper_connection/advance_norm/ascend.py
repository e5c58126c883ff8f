"""advance_norm on Ascend: the blocks of the CUDA kernel on the vector cores."""

from tilelang_ops.hyper_connection.advance_norm.cuda import run

__all__ = ["run"]
