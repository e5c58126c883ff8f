"""swiglu on Ascend: the blocks of the CUDA kernel on the vector cores."""

from tilelang_ops.moe.swiglu.cuda import run

__all__ = ["run"]
