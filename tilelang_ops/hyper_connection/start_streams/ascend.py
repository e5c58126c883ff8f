"""start_streams on Ascend: the blocks of the CUDA kernel on the vector cores."""

from tilelang_ops.hyper_connection.start_streams.cuda import run

__all__ = ["run"]
