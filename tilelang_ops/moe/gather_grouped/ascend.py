"""gather_grouped on Ascend: the blocks of the CUDA kernel on the vector cores."""

from tilelang_ops.moe.gather_grouped.cuda import run

__all__ = ["run"]
