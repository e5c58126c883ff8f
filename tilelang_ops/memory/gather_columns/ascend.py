"""gather_columns on Ascend: the blocks of the CUDA kernel on the vector cores."""

from tilelang_ops.memory.gather_columns.cuda import run

__all__ = ["run"]
