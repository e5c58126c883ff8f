"""window_index on Ascend: the blocks of the CUDA kernel on the vector cores."""

from tilelang_ops.kv_index.window_index.cuda import run

__all__ = ["run"]
